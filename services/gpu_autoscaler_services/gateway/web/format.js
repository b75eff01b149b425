// Formats of numbers, times and elements for the whole page.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Creates an element: `h("li", {class: "node"}, "text", child)`. Text is never parsed as markup. */
export const h = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

const two = (number) => String(number).padStart(2, "0");

/** Hours, minutes and seconds of an instant, in the reader's time zone. */
export function clockTime(instant) {
  const date = new Date(instant);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function shortTime(instant) {
  const date = new Date(instant);
  return `${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** A duration in seconds as its two largest units: `2 h 5 min`. */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
}

/** Micro-dollars as dollars; amounts below 10 cents have four decimals. */
export function usd(micro) {
  const dollars = micro / 1e6;
  const digits = dollars === 0 || dollars >= 0.1 ? 2 : 4;
  return `$${dollars.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
}

export const count = (number, noun, plural = `${noun}s`) => `${number} ${number === 1 ? noun : plural}`;

/** The start of a long identifier. */
export const short = (id) => (id && id.length > 16 ? `${id.slice(0, 8)}…` : id || "");
