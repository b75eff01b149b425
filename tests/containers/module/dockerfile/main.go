// Reads a Dockerfile as BuildKit does, and prints what its linter warns of; exits with 1 where there is anything.
package main

import (
	"fmt"
	"os"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

func main() {
	found := 0
	warn := func(rule, description, url, message string, location []parser.Range) {
		found++
		fmt.Printf("%s: %s %v\n", rule, message, location)
	}
	parsed, err := parser.Parse(os.Stdin)
	if err == nil {
		_, _, err = instructions.Parse(parsed.AST, linter.New(&linter.Config{Warn: warn}))
	}
	if err != nil {
		fmt.Println(err)
		found++
	}
	if found > 0 {
		os.Exit(1)
	}
}
