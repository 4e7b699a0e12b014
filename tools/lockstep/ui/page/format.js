// Numbers, sizes, times and elements.

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7))
    return value
      .toExponential(3)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return String(Number(value.toPrecision(5)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${Number((seconds / 60).toFixed(1))} min`;
  if (seconds < 2 * 86400) return `${Number((seconds / 3600).toFixed(1))} h`;
  return `${Number((seconds / 86400).toFixed(1))} d`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

export function clockTime(unixSeconds) {
  return unixSeconds > 0 ? new Date(unixSeconds * 1000).toLocaleString() : "–";
}

// element("td", {class: "number", title: "..."}, "text" or element, ...)
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Sets a text only if it differs: an unchanged element keeps its selection and causes no layout.
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

const stateMarks = {
  running: "▶",
  complete: "✔",
  finished: "✔",
  "stopped early": "✔",
  stopped: "■",
  failed: "✖",
  silent: "?",
  interrupted: "■",
  removed: "∅",
};

// A state by mark, word and colour.
export function setState(target, state) {
  setText(target, `${stateMarks[state] ?? "·"} ${state === "silent" ? "no news" : state}`);
  const name = `state state-${state.replaceAll(" ", "-")}`;
  if (target.className !== name) target.className = name;
}
