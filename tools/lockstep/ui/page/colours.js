// Colours of runs: a palette for colour-blind readers (Okabe and Ito), as in the pictures of lockstep plot. From the
// seventh run on, lines are dashed.

const light = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
const dark = ["#4ba3e3", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#a5dcff"];
const dashes = [[], [7, 3], [2, 3], [9, 3, 2, 3], [14, 4], [4, 2, 1, 2, 1, 2]];

export const darkMode = window.matchMedia("(prefers-color-scheme: dark)");

export function colourOf(slot) {
  return (darkMode.matches ? dark : light)[slot % light.length];
}

export function dashOf(slot) {
  return dashes[Math.floor(slot / light.length) % dashes.length];
}

// The colours of axes and texts on a canvas.
export function inks() {
  return darkMode.matches
    ? {ink: "#e6edf3", faint: "#9aa4ae", grid: "#30363d", paper: "#0d1117"}
    : {ink: "#222222", faint: "#666666", grid: "#e2e2e2", paper: "#ffffff"};
}

// Gives each selected run the lowest free slot, and keeps it until the run is deselected.
export class Slots {
  constructor() {
    this.slots = new Map();
  }

  assign(ids) {
    for (const id of this.slots.keys()) if (!ids.has(id)) this.slots.delete(id);
    const used = new Set(this.slots.values());
    let next = 0;
    for (const id of ids) {
      if (this.slots.has(id)) continue;
      while (used.has(next)) next += 1;
      used.add(next);
      this.slots.set(id, next);
    }
  }

  of(id) {
    return this.slots.get(id) ?? -1;
  }
}
