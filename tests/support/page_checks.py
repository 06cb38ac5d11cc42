"""A page as a browser shows it: text that overlaps, is cut off or cannot be read.

Text is measured where the browser has put it, also in matplotlib's pictures, whose
letters are paths. What scrolls inside the page may be wider than the page.
"""

from support.browser import Page

SMALLEST_TEXT = 11
"""Pixels of the smallest font."""

LEAST_CONTRAST = 4.5
"""Contrast of text with what is behind it (WCAG 2, AA)."""

_TEXTS = """
  // [{e, text, box, font, paint, layers}]: every text that can be seen or scrolled to.
  const ancestors = function* (e) { for (; e; e = e.parentElement) yield e; };
  const style = (e) => getComputedStyle(e);
  const part = (box, frame) => ({
    left: Math.max(box.left, frame.left), right: Math.min(box.right, frame.right),
    top: Math.max(box.top, frame.top), bottom: Math.min(box.bottom, frame.bottom)});
  const seen = (box, e) => {
    for (const a of ancestors(e))
      if (!a.closest("svg") && !a.contains(document.body) &&
          style(a).overflowX != "visible")
        box = part(box, a.getBoundingClientRect());
    return box;
  };
  const whole = {opacityProperty: true, visibilityProperty: true};
  const hidden = (e) => !e.checkVisibility(whole) || [...ancestors(e)].some(
    (a) => style(a).position == "fixed" && a.getBoundingClientRect().right <= 0);
  const backgrounds = (e) => [...ancestors(e)].map((a) => style(a).backgroundColor);
  const texts = [];
  const add = (e, text, boxes, font, paint, layers) => {
    text = text.trim().replace(/\\s+/g, " ").slice(0, 40);
    for (const box of boxes.map((box) => seen(box, e)))
      if (box.right - box.left >= 1 && box.bottom - box.top >= 1)
        texts.push({e, text, box, font, paint, layers});
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.data.trim() || e.closest("script, style, noscript, svg")) continue;
    if (hidden(e)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    add(e, node.data, [...range.getClientRects()], parseFloat(style(e).fontSize),
        style(e).color, backgrounds(e).reverse());
  }
"""

_PICTURES = """
  // Texts of pictures lie over the shapes that were drawn before them.
  for (const svg of document.querySelectorAll("svg:has(g[id^=text_])")) {
    const frame = svg.getBoundingClientRect(), shapes = [];
    const scale = frame.width / svg.viewBox.baseVal.width;
    for (const e of svg.querySelectorAll("path, use, image, g[id^=text_]")) {
      const box = e.getBoundingClientRect();
      if (!e.id.startsWith("text_")) {
        if (!e.closest("defs, g[id^=text_]")) shapes.push({e, box});
        continue;
      }
      const note = [...e.childNodes].find((n) => n.nodeType == Node.COMMENT_NODE);
      const letters = e.querySelector("g[transform*=scale]");
      if (!note || !letters) continue;
      const text = note.data.trim();
      if (part(box, frame).right - part(box, frame).left < box.right - box.left - 1)
        problems.push(`${text}: is cut by its picture`);
      const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
      const under = shapes.filter(({box}) =>
        box.left <= x && x <= box.right && box.top <= y && y <= box.bottom);
      const last = under.findLastIndex(({e}) => e.localName == "image");
      const fills = under.slice(last + 1).map(({e}) => style(e).fill);
      // Pictures of pixels are pale (`mesh_figure`).
      const layers = last < 0 ? backgrounds(svg).reverse() : ["white"];
      const height = /scale\\(([\\d.]+)/.exec(letters.getAttribute("transform"))[1];
      add(e, text, [box], 100 * height * scale, style(letters).fill,
          [...layers, ...fills.filter((fill) => fill != "none")]);
    }
  }
"""

_JUDGE = """
  const width = document.documentElement.clientWidth;
  for (const {text, box} of texts)
    if (box.left < -1 || box.right > width + 1)
      problems.push(`${text}: leaves the page`);

  // Of two texts neither may lie over the other, unless one holds the other, or stays
  // where it is while the other scrolls below it.
  const pinned = (e) => [...ancestors(e)].find(
    (a) => ["sticky", "fixed"].includes(style(a).position));
  texts.sort((a, b) => a.box.top - b.box.top);
  texts.forEach(({e, box, text}, i) => {
    for (const other of texts.slice(i + 1)) {
      if (other.box.top > box.bottom - 2) break;
      const common = part(box, other.box);
      if (common.right - common.left > 2 && common.bottom - common.top > 2 &&
          !other.e.contains(e) && !e.contains(other.e) && pinned(e) == pinned(other.e))
        problems.push(`${text}: overlaps ${other.text}`);
    }
  });

  const canvas = document.createElement("canvas");
  const paint = canvas.getContext("2d", {willReadFrequently: true}), known = new Map();
  const luminance = (colors) => {
    const key = colors.join();
    if (known.has(key)) return known.get(key);
    for (const color of ["white", ...colors]) {
      paint.fillStyle = color;
      paint.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map((v) =>
      v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    known.set(key, 0.2126 * r + 0.7152 * g + 0.0722 * b);
    return known.get(key);
  };
  for (const {text, font, paint, layers} of texts) {
    if (font < SMALLEST) problems.push(`${text}: its font has ${font} pixels`);
    const ink = luminance([...layers, paint]) + 0.05, behind = luminance(layers) + 0.05;
    const contrast = Math.max(ink, behind) / Math.min(ink, behind);
    if (contrast < CONTRAST)
      problems.push(`${text}: contrast ${contrast.toFixed(2)}`);
  }

  const here = location.href.split("#")[0];
  for (const a of document.querySelectorAll("a[href]")) {
    const [page, name] = a.href.split("#");
    if (page == here && name && !document.getElementById(decodeURIComponent(name)))
      problems.push(`#${name}: no such place on the page`);
  }
  const found = document.documentElement.scrollWidth;
  if (found > width) problems.push(`${found} pixels on a window of ${width}`);
"""

_SCRIPT = f"""(() => {{
  const SMALLEST = {SMALLEST_TEXT}, CONTRAST = {LEAST_CONTRAST}, problems = [];
  // A color that has changed may start the change of those that inherit it.
  for (let tries = 0; tries < 20; tries++)
    for (const change of document.getAnimations())
      if (change.effect.getTiming().iterations != Infinity) change.finish();
  {_TEXTS} {_PICTURES} {_JUDGE}
  return [...new Set(problems)];
}})()"""


def problems(page: Page) -> list[str]:
    """What is wrong with the page as it is shown, one line each."""
    return page.value(_SCRIPT)
