// A chart of one metric: the curves of the selected runs, with zoom, crosshair and a description for screen readers.
//
// The server sends at most one bucket per pixel, with the lowest and the highest value in it. A curve is drawn as a
// line through both, so that spikes stay visible. With smoothing, that line is faint and the smoothed line is above it.
// The crosshair and the selection are on a second canvas: moving the mouse does not draw the curves again.
//
// A run may have thousands of metrics. Only charts on the screen have pixels: a canvas takes half a megabyte.

import {Scale, linearTicks, logTicks, tickLabel, timeUnit} from "./axis.js";
import {colourOf, dashOf, inks} from "./colours.js";
import {duration, element, number, setText} from "./format.js";

const margin = {left: 52, right: 10, top: 8, bottom: 30};
const height = 240;
const font = "11px system-ui, sans-serif";

// How long the last redraws took, in milliseconds; tests and the curious read it.
export const drawTimes = [];

export class Chart {
  // `view` is shared by all charts: {x, logX, logY, zoom}.
  // `actions`: {zoom(from, to), reset(), hover(x, chart), announce(text)}.
  constructor(metric, view, actions) {
    this.metric = metric;
    this.view = view;
    this.actions = actions;
    this.lines = [];
    this.isVisible = false;
    this.isStale = true;
    this.drag = null;
    this.build();
  }

  build() {
    this.canvas = null; // while the chart is not on the screen
    this.overlay = element("canvas", {
      class: "overlay",
      tabindex: "0",
      role: "img",
      "aria-describedby": `summary-${encodeURIComponent(this.metric)}`,
    });
    this.tip = element("div", {class: "tip", hidden: true});
    this.summary = element("p", {class: "unseen", id: `summary-${encodeURIComponent(this.metric)}`});
    this.note = element("span", {class: "hint"});
    this.box = element("div", {class: "plot"}, this.overlay, this.tip);
    this.figure = element(
      "figure",
      {class: "chart far", "data-metric": this.metric},
      element("figcaption", {}, element("h3", {}, this.metric), this.note),
      this.box,
      this.summary,
    );
    this.overlay.addEventListener("pointerdown", (event) => this.beginDrag(event));
    this.overlay.addEventListener("pointermove", (event) => this.move(event));
    this.overlay.addEventListener("pointerup", (event) => this.endDrag(event));
    this.overlay.addEventListener("pointercancel", () => this.cancelDrag());
    this.overlay.addEventListener("pointerleave", () => this.drag || this.actions.hover(null, this));
    this.overlay.addEventListener("dblclick", () => this.actions.reset());
    this.overlay.addEventListener("keydown", (event) => this.key(event));
    this.overlay.addEventListener("blur", () => this.actions.hover(null, this));
  }

  get width() {
    return this.box.clientWidth;
  }

  setVisible(isVisible) {
    if (isVisible === this.isVisible) return;
    this.isVisible = isVisible;
    this.figure.classList.toggle("far", !isVisible);
    if (isVisible) {
      this.canvas = element("canvas", {class: "curves", "aria-hidden": "true"});
      this.box.prepend(this.canvas);
      this.draw();
    } else {
      this.canvas.remove();
      this.canvas = null;
      this.overlay.width = 0;
      this.overlay.height = 0;
      this.tip.hidden = true;
    }
  }

  // `lines`: [{name, slot, steps, epochs}], as the server sends curves; `domain`: {from, to} of the horizontal axis.
  setLines(lines, domain) {
    this.lines = lines;
    this.domain = domain;
    this.draw();
    this.describe();
  }

  // --- drawing

  draw() {
    if (!this.isVisible || this.width === 0) return;
    const begin = performance.now();
    const context = this.prepare(this.canvas);
    const {from, to, low, high} = this.ranges();
    this.xScale = new Scale(from, to, margin.left, this.width - margin.right, this.view.logX);
    this.yScale = new Scale(low, high, height - margin.bottom, margin.top, this.view.logY);
    this.drawAxes(context, from, to, low, high);
    context.save();
    context.beginPath();
    context.rect(
      margin.left,
      margin.top,
      this.width - margin.left - margin.right + 4,
      height - margin.top - margin.bottom,
    );
    context.clip();
    context.lineJoin = "bevel";
    // Browsers draw lines of one pixel ten times as fast as wider ones.
    const points = this.lines.reduce((sum, line) => sum + line.steps.x.length + line.epochs.x.length, 0);
    this.isCrowded = points > 5000;
    for (const line of this.lines) if (line.steps.smooth) this.drawRaw(context, line, true);
    for (const line of this.lines) {
      if (line.steps.smooth) this.drawSmooth(context, line);
      else this.drawRaw(context, line, false);
      this.drawEpochs(context, line);
    }
    context.restore();
    drawTimes.push(performance.now() - begin);
    if (drawTimes.length > 1000) drawTimes.shift();
  }

  // The canvas with the resolution of the screen, cleared.
  prepare(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.round(this.width * ratio);
    if (canvas.width !== width || canvas.height !== Math.round(height * ratio)) {
      canvas.width = width;
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, height);
    return context;
  }

  ranges() {
    let {from, to} = this.domain ?? {from: 0, to: 1};
    if (this.view.logX && !(from > 0)) from = this.smallestX();
    if (!(to > from)) to = this.view.logX ? from * 10 : from + 1;
    let low = Infinity;
    let high = -Infinity;
    const include = (values, x) => {
      for (let i = 0; i < values.length; i += 1) {
        const value = values[i];
        if (value === null || x[i] < from || x[i] > to || (this.view.logY && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    };
    for (const line of this.lines)
      for (const curve of [line.steps, line.epochs]) {
        include(curve.low, curve.x);
        if (curve.high) include(curve.high, curve.x);
      }
    if (low > high) [low, high] = this.view.logY ? [0.1, 1] : [0, 1];
    if (low === high)
      [low, high] = this.view.logY
        ? [low / 2, high * 2]
        : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const room = (high - low) * 0.04;
    return this.view.logY
      ? {from, to, low: low / 1.1, high: high * 1.1}
      : {from, to, low: low - room, high: high + room};
  }

  smallestX() {
    let smallest = Infinity;
    for (const line of this.lines)
      for (const curve of [line.steps, line.epochs]) for (const x of curve.x) if (x > 0 && x < smallest) smallest = x;
    return smallest === Infinity ? 1 : smallest;
  }

  drawAxes(context, from, to, low, high) {
    const {faint, grid} = inks();
    context.font = font;
    context.lineWidth = 1;
    context.strokeStyle = grid;
    context.fillStyle = faint;
    const yTicks = this.view.logY ? logTicks(low, high, 6) : linearTicks(low, high, 6);
    const yStep = this.view.logY ? 0 : yTicks[1] - yTicks[0];
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.beginPath();
    for (const tick of yTicks) {
      const y = Math.round(this.yScale.at(tick)) + 0.5;
      context.moveTo(margin.left, y);
      context.lineTo(this.width - margin.right, y);
      context.fillText(tickLabel(tick, yStep), margin.left - 6, y);
    }
    context.stroke();
    const [unit, unitName] = this.view.x === "time" ? timeUnit(to) : [1, this.view.x];
    const most = Math.max(2, Math.floor(this.width / 90));
    const xTicks = (this.view.logX ? logTicks : linearTicks)(from / unit, to / unit, most);
    const xStep = this.view.logX ? 0 : xTicks[1] - xTicks[0];
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of xTicks) {
      const x = this.xScale.at(tick * unit);
      context.textAlign = x > this.width - margin.right - 14 ? "right" : "center";
      context.fillText(tickLabel(tick, xStep), Math.min(x, this.width - 2), height - margin.bottom + 5);
    }
    context.textAlign = "right";
    context.fillText(unitName, this.width - margin.right, height - 12);
  }

  // The line through the lowest and the highest value of each bucket.
  drawRaw(context, line, isFaint) {
    const {x, low, high} = line.steps;
    if (x.length === 0) return;
    context.strokeStyle = colourOf(line.slot);
    context.globalAlpha = isFaint ? 0.25 : 1;
    context.lineWidth = this.lineWidth(isFaint ? 1 : 1.3);
    context.setLineDash(isFaint || high ? [] : dashOf(line.slot));
    context.beginPath();
    let isPen = false;
    let isUp = true;
    for (let i = 0; i < x.length; i += 1) {
      const bottom = low[i];
      if (bottom === null || (this.view.logY && bottom <= 0)) {
        isPen = false;
        continue;
      }
      const at = this.xScale.at(x[i]);
      const top = high ? high[i] : bottom;
      const first = this.yScale.at(isUp ? bottom : top);
      if (isPen) context.lineTo(at, first);
      else context.moveTo(at, first);
      if (top !== bottom) {
        context.lineTo(at, this.yScale.at(isUp ? top : bottom));
        isUp = !isUp;
      } else if (!isPen && (i + 1 === x.length || low[i + 1] === null)) {
        context.lineTo(at + 1, first); // a point alone
      }
      isPen = true;
    }
    context.stroke();
    context.globalAlpha = 1;
    context.setLineDash([]);
  }

  lineWidth(wanted) {
    return this.isCrowded ? Math.min(1, 1 / (window.devicePixelRatio || 1)) : wanted;
  }

  drawSmooth(context, line) {
    const {x, smooth} = line.steps;
    context.strokeStyle = colourOf(line.slot);
    context.lineWidth = this.lineWidth(1.6);
    context.setLineDash(dashOf(line.slot));
    context.beginPath();
    let isPen = false;
    for (let i = 0; i < x.length; i += 1) {
      const value = smooth[i];
      if (value === null || (this.view.logY && value <= 0)) {
        isPen = false;
        continue;
      }
      if (isPen) context.lineTo(this.xScale.at(x[i]), this.yScale.at(value));
      else context.moveTo(this.xScale.at(x[i]), this.yScale.at(value));
      isPen = true;
    }
    context.stroke();
    context.setLineDash([]);
  }

  // Epochs are lines with markers.
  drawEpochs(context, line) {
    const {x, low} = line.epochs;
    if (x.length === 0) return;
    context.strokeStyle = context.fillStyle = colourOf(line.slot);
    context.lineWidth = this.lineWidth(1.6);
    context.setLineDash(dashOf(line.slot));
    const dots = new Path2D();
    context.beginPath();
    let isPen = false;
    let lastDot = -Infinity;
    for (let i = 0; i < x.length; i += 1) {
      if (low[i] === null || (this.view.logY && low[i] <= 0)) {
        isPen = false;
        continue;
      }
      const at = this.xScale.at(x[i]);
      const y = this.yScale.at(low[i]);
      if (isPen) context.lineTo(at, y);
      else context.moveTo(at, y);
      isPen = true;
      if (at - lastDot >= 9) {
        dots.moveTo(at + 2.6, y);
        dots.arc(at, y, 2.6, 0, 2 * Math.PI);
        lastDot = at;
      }
    }
    context.stroke();
    context.setLineDash([]);
    context.fill(dots);
  }

  // --- crosshair

  // The values next to a position: [{name, slot, x, value}], highest first.
  valuesAt(position) {
    const values = [];
    for (const line of this.lines) {
      const curve = line.steps.x.length > 0 ? line.steps : line.epochs;
      const shown = curve.smooth ?? curve.low;
      const i = nearest(curve.x, position, this.view.logX);
      if (i < 0 || shown[i] === null) continue;
      if (position > curve.last_x + (this.domain.to - this.domain.from) / 100) continue; // the run has not come so far
      values.push({name: line.name, slot: line.slot, x: curve.x[i], value: shown[i]});
    }
    return values.sort((a, b) => b.value - a.value);
  }

  positionText(x) {
    return this.view.x === "time"
      ? duration(x)
      : `${this.view.x} ${number(this.view.x === "step" ? Math.round(x) : x)}`;
  }

  // Draws the crosshair at a position of the axis, with the values if this chart is the one that is pointed at.
  showCrosshair(position, isPointedAt) {
    const context = this.prepare(this.overlay);
    this.crosshair = position;
    this.tip.hidden = true;
    if (this.drag && this.drag.to !== this.drag.from) this.drawSelection(context);
    if (position === null || !this.xScale || this.lines.length === 0) return;
    const x = this.xScale.at(position);
    if (x < margin.left - 1 || x > this.width - margin.right + 1) return;
    context.strokeStyle = inks().faint;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(x, margin.top);
    context.lineTo(x, height - margin.bottom);
    context.stroke();
    context.setLineDash([]);
    const values = this.valuesAt(position);
    for (const {slot, x: at, value} of values) {
      if (this.view.logY && value <= 0) continue;
      context.fillStyle = colourOf(slot);
      context.beginPath();
      context.arc(this.xScale.at(at), this.yScale.at(value), 3, 0, 2 * Math.PI);
      context.fill();
    }
    if (isPointedAt && !this.drag) this.showTip(x, position, values);
  }

  showTip(x, position, values) {
    const most = 12;
    this.tip.replaceChildren(element("strong", {}, this.positionText(position)));
    for (const {name, slot, value} of values.slice(0, most)) {
      const chip = element("span", {class: "chip"});
      chip.style.background = colourOf(slot);
      this.tip.append(
        element("div", {}, chip, element("span", {class: "tip-name"}, name), element("b", {}, number(value))),
      );
    }
    if (values.length > most) this.tip.append(element("div", {}, `and ${values.length - most} more`));
    this.tip.hidden = false;
    const isRight = x > this.width / 2;
    this.tip.style.left = isRight ? "" : `${x + 12}px`;
    this.tip.style.right = isRight ? `${this.width - x + 12}px` : "";
  }

  drawSelection(context) {
    context.fillStyle = "rgba(0, 114, 178, 0.2)";
    const left = Math.min(this.drag.from, this.drag.to);
    context.fillRect(left, margin.top, Math.abs(this.drag.to - this.drag.from), height - margin.top - margin.bottom);
  }

  // --- mouse and keys

  pixelOf(event) {
    const x = event.clientX - this.overlay.getBoundingClientRect().left;
    return Math.min(Math.max(x, margin.left), this.width - margin.right);
  }

  beginDrag(event) {
    if (event.button !== 0 || !this.xScale) return;
    this.overlay.setPointerCapture(event.pointerId);
    this.drag = {from: this.pixelOf(event), to: this.pixelOf(event)};
  }

  move(event) {
    if (!this.xScale) return;
    if (this.drag) this.drag.to = this.pixelOf(event);
    this.actions.hover(this.xScale.valueAt(this.pixelOf(event)), this);
  }

  endDrag(event) {
    if (!this.drag) return;
    const {from} = this.drag;
    const to = this.pixelOf(event);
    this.drag = null;
    if (Math.abs(to - from) >= 5)
      this.actions.zoom(this.xScale.valueAt(Math.min(from, to)), this.xScale.valueAt(Math.max(from, to)));
    else this.actions.hover(this.xScale.valueAt(to), this);
  }

  cancelDrag() {
    this.drag = null;
    this.actions.hover(null, this);
  }

  // Arrows move the crosshair, + and - zoom around it, 0 and Escape reset.
  key(event) {
    if (!this.xScale || event.ctrlKey || event.metaKey || event.altKey) return;
    const left = margin.left;
    const right = this.width - margin.right;
    const at =
      this.crosshair === null || this.crosshair === undefined ? (left + right) / 2 : this.xScale.at(this.crosshair);
    const step = event.shiftKey ? 40 : 8;
    const moveTo = (pixel) => {
      const position = this.xScale.valueAt(Math.min(Math.max(pixel, left), right));
      this.actions.hover(position, this);
      const values = this.valuesAt(position)
        .slice(0, 6)
        .map(({name, value}) => `${name} ${number(value)}`);
      this.actions.announce(`${this.metric}, ${this.positionText(position)}: ${values.join(", ") || "no values"}`);
    };
    const zoomBy = (factor) => {
      const half = ((right - left) * factor) / 2;
      const middle = Math.min(
        Math.max(at, left + Math.min(half, (right - left) / 2)),
        right - Math.min(half, (right - left) / 2),
      );
      if (factor < 1) this.actions.zoom(this.xScale.valueAt(middle - half), this.xScale.valueAt(middle + half));
      else this.actions.zoom(this.xScale.valueAt(at - half), this.xScale.valueAt(at + half));
    };
    const keys = {
      ArrowLeft: () => moveTo(at - step),
      ArrowRight: () => moveTo(at + step),
      Home: () => moveTo(left),
      End: () => moveTo(right),
      "+": () => zoomBy(0.5),
      "=": () => zoomBy(0.5),
      "-": () => zoomBy(2),
      0: () => this.actions.reset(),
      Escape: () => this.actions.reset(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  // --- for screen readers

  describe() {
    const parts = this.lines.slice(0, 10).map((line) => {
      const curve = line.epochs.points > 0 ? line.epochs : line.steps;
      if (curve.points === 0) return `${line.name}: no values`;
      const range = `lowest ${number(curve.lowest)}, highest ${number(curve.highest)}`;
      return `${line.name}: last ${number(curve.last)}, ${range}`;
    });
    const rest = this.lines.length > 10 ? `, and ${this.lines.length - 10} more runs` : "";
    const count = this.lines.length === 1 ? "1 run" : `${this.lines.length} runs`;
    setText(this.summary, `${parts.join("; ")}${rest}. Arrow keys read values, + and - zoom, 0 resets.`);
    this.overlay.setAttribute("aria-label", `Chart of ${this.metric} over ${this.view.x}, ${count}`);
  }
}

// The index of the position closest to `wanted` in an ascending list; -1 if it is empty.
export function nearest(positions, wanted) {
  if (positions.length === 0) return -1;
  let low = 0;
  let high = positions.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (positions[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - positions[low - 1] < positions[low] - wanted ? low - 1 : low;
}
