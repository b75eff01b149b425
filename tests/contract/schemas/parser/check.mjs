// Exits 0 when the official parser accepts the AsyncAPI document without an error or a warning; else prints each.
import { readFileSync } from "node:fs";
import { Parser } from "@asyncapi/parser";

const { document, diagnostics } = await new Parser().parse(readFileSync(process.argv[2], "utf8"));
for (const found of diagnostics) {
  console.error(`${found.code} at ${found.path.join(".")}: ${found.message}`);
}
process.exit(document && diagnostics.length === 0 ? 0 : 1);
