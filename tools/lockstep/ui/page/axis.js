// Maps values to pixels, and chooses ticks. Pure.

export class Scale {
  constructor(from, to, begin, end, isLog) {
    this.isLog = isLog;
    this.begin = begin;
    this.a = isLog ? Math.log10(from) : from;
    const b = isLog ? Math.log10(to) : to;
    this.factor = b > this.a ? (end - begin) / (b - this.a) : 0;
  }

  at(value) {
    return this.begin + ((this.isLog ? Math.log10(value) : value) - this.a) * this.factor;
  }

  valueAt(pixel) {
    if (this.factor === 0) return this.isLog ? 10 ** this.a : this.a;
    const placed = this.a + (pixel - this.begin) / this.factor;
    return this.isLog ? 10 ** placed : placed;
  }
}

function niceStep(span, most) {
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= rough * 0.999999) return factor * power;
  return 10 * power;
}

export function linearTicks(from, to, most) {
  if (!(to > from)) return [from];
  const step = niceStep(to - from, most);
  const ticks = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i += 1) ticks.push(i * step);
  return ticks;
}

export function logTicks(from, to, most) {
  const first = Math.ceil(Math.log10(from) - 1e-9);
  const last = Math.floor(Math.log10(to) + 1e-9);
  const powers = [];
  const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(1, most)));
  for (let power = first; power <= last; power += every) powers.push(10 ** power);
  if (powers.length >= 2) return powers;
  const ticks = [];
  for (let power = first - 1; power <= last; power += 1)
    for (const factor of [1, 2, 5]) {
      const tick = factor * 10 ** power;
      if (tick >= from && tick <= to) ticks.push(tick);
    }
  return ticks.length >= 2 ? ticks : linearTicks(from, to, most);
}

// A label with as many digits as neighbouring ticks need.
export function tickLabel(value, step) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4)
    return value
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  if (size >= 1e4 && (step ? Number.isInteger(step / 1e3) : Number.isInteger(value / 1e3))) return `${value / 1e3}k`;
  if (!step) return String(Number(value.toPrecision(3)));
  const decimals = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
  return value.toFixed(decimals);
}

// The unit for times on an axis that ends at `seconds`: [seconds per unit, name].
export function timeUnit(seconds) {
  if (seconds < 300) return [1, "s"];
  if (seconds < 3 * 3600) return [60, "min"];
  if (seconds < 3 * 86400) return [3600, "h"];
  return [86400, "d"];
}
