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

const isSame = (old, fresh) => old.nodeType === Node.ELEMENT_NODE && old.nodeName === fresh.nodeName && old.dataset?.key === fresh.dataset?.key;

/** Makes `children` the content of an element and leaves untouched what is equal, so that selection and focus stay. */
function patch(parent, children) {
  children.forEach((fresh, index) => {
    const old = parent.childNodes[index];
    if (!old) parent.append(fresh);
    else if (old.isEqualNode(fresh)) return;
    else if (isSame(old, fresh)) {
      for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of fresh.attributes) old.setAttribute(name, value);
      patch(old, [...fresh.childNodes]);
    } else old.replaceWith(fresh);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

/** Replaces the content of an element. What moved keeps the focus, by its `data-key`; the scroll position stays. */
export function redraw(element, children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const { scrollTop, scrollLeft } = element;
  patch(element, children);
  if (focused && document.activeElement.dataset.key !== focused) focusOn(element, focused);
  Object.assign(element, { scrollTop, scrollLeft });
}

/** Focuses the element with this `data-key`, if it is still there. */
export function focusOn(element, key) {
  element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
