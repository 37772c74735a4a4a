// Tick positions at round numbers.

/** Return a step of 1, 2 or 5 times a power of ten, so that at most `most` of them fit in `span`. */
export function roundStep(span: number, most: number): number {
  if (!(span > 0) || most < 1) {
    return 1;
  }
  const least = span / most;
  const power = 10 ** Math.floor(Math.log10(least));
  const factor = [1, 2, 5, 10].find((one) => one * power >= least * (1 - 1e-9)) ?? 10;
  return factor * power;
}

/** Return the multiples of a round step between two numbers. */
export function ticksBetween(first: number, last: number, most: number): number[] {
  const step = roundStep(last - first, most);
  const found: number[] = [];
  for (let place = Math.ceil(first / step - 1e-9); place * step <= last + step * 1e-9; place += 1) {
    found.push(place * step + 0); // no -0
  }
  return found;
}

/** Return nanoseconds as text in a unit that fits the distance between ticks: "12.5 ms". */
export function timeTick(ns: number, stepNs: number): string {
  const [size, unit] = stepNs >= 1e9 ? [1e9, "s"] : stepNs >= 1e6 ? [1e6, "ms"] : stepNs >= 1e3 ? [1e3, "\u00b5s"] : [1, "ns"];
  const digits = Math.max(0, -Math.floor(Math.log10(stepNs / size) + 1e-9));
  return `${(ns / size).toFixed(Math.min(digits, 3))}\u202f${unit}`;
}
