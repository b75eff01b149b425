// Drives one page of a real Chromium: one JSON request per line of standard input, one JSON answer per line of standard
// output. A request names a method of the page, or of the elements that a selector matches.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [executablePath] = process.argv.slice(2);
const WAIT_MILLISECONDS_MAX = 60000;
const axe = readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
const browser = await chromium.launch({ executablePath });
let page = null;
let errors = []; // of scripts and of the content security policy; a refused request is none

async function open({ url, ...options }) {
  await page?.context().close();
  const context = await browser.newContext(options);
  context.setDefaultTimeout(WAIT_MILLISECONDS_MAX);
  page = await context.newPage();
  errors = [];
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error" && !message.text().startsWith("Failed to load resource")) errors.push(message.text());
  });
  await page.goto(url);
}

/** The violations of all rules, those of good practice included, each with the elements that break it. */
async function violations() {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document));
  return violations.map(({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`);
}

/** Elements that reach beyond the width of the page. */
const overflowing = () =>
  page.evaluate(() => {
    const width = document.documentElement.clientWidth;
    return document.documentElement.scrollWidth > width ? [...document.querySelectorAll("main *")].filter((element) => element.getBoundingClientRect().right > width + 1).map((element) => element.outerHTML.slice(0, 160)) : [];
  });

const commands = { open, violations, overflowing, errors: async () => errors };

async function answer({ method, selector, args = [] }) {
  if (!selector && commands[method]) return commands[method](...args);
  if (method.startsWith("keyboard.")) return page.keyboard[method.slice(9)](...args);
  return selector ? page.locator(selector)[method](...args) : page[method](...args);
}

for await (const line of createInterface({ input: process.stdin })) {
  let reply;
  try {
    const result = await answer(JSON.parse(line));
    reply = { result: result instanceof Uint8Array || result === undefined ? null : result };
  } catch (error) {
    reply = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}
await browser.close();
