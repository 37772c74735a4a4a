// A table of names, bars and numbers.

import type { ComponentChildren, JSX } from "preact";

export interface Bar {
  key: string;
  label: ComponentChildren;
  value: number;
  text: string;
  href?: string;
  tone?: "bad" | "warning" | "quiet";
}

interface BarsProps {
  caption: string;
  bars: readonly Bar[];
  /** The value of an empty bar, 0 by default; for a slowdown it is 1. */
  from?: number;
  /** The full length stands for at least this value. */
  atLeast?: number;
}

export function Bars({ caption, bars, from = 0, atLeast = 0 }: BarsProps): JSX.Element {
  const most = Math.max(atLeast, ...bars.map((bar) => bar.value - from), Number.MIN_VALUE);
  return (
    <table class="bars">
      <caption class="visually-hidden">{caption}</caption>
      <tbody>
        {bars.map((bar) => (
          <tr key={bar.key}>
            <th scope="row">{bar.href === undefined ? bar.label : <a href={bar.href}>{bar.label}</a>}</th>
            <td class="bar-cell" aria-hidden="true">
              <span
                class={bar.tone === undefined ? "bar" : `bar tone-${bar.tone}`}
                style={{ width: `${Math.max(0, Math.min(1, (bar.value - from) / most)) * 100}%` }}
              />
            </td>
            <td class="number">{bar.text}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export interface Part {
  key: string;
  label: string;
  value: number;
  text: string;
}

const NUM_COLORS = 7;

/** Parts of a whole in one row, in order, with a legend, such as the phases of a recovery. */
export function PartsBar({ caption, parts }: { caption: string; parts: readonly Part[] }): JSX.Element {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return (
    <figure class="parts">
      <div class="parts-bar" aria-hidden="true">
        {parts.map((part, index) => (
          <span
            key={part.key}
            class={`part part-${(index % NUM_COLORS) + 1}`}
            title={`${part.label}: ${part.text}`}
            style={{ flexGrow: total > 0 ? part.value / total : 0 }}
          />
        ))}
      </div>
      <figcaption class="visually-hidden">{caption}</figcaption>
      <dl class="parts-legend">
        {parts.map((part, index) => (
          <div key={part.key}>
            <dt>
              <span class={`part-key part-${(index % NUM_COLORS) + 1}`} aria-hidden="true" />
              {part.label}
            </dt>
            <dd class="number">{part.text}</dd>
          </div>
        ))}
      </dl>
    </figure>
  );
}

interface SparklineProps {
  values: readonly (number | null)[];
  label: string;
  /** The height of the line stands for at least this span, so that small variations look small. */
  leastSpan?: number;
}

/** A line without axes, as high as a line of text. */
export function Sparkline({ values, label, leastSpan = 0 }: SparklineProps): JSX.Element | null {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) {
    return null;
  }
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const span = Math.max(most - least, leastSpan) || 1;
  const low = (least + most - span) / 2;
  const points: string[] = [];
  values.forEach((value, index) => {
    if (value !== null) {
      points.push(`${((index / (values.length - 1)) * 100).toFixed(2)},${(22 - ((value - low) / span) * 20).toFixed(2)}`);
    }
  });
  return (
    <svg class="sparkline" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label={label}>
      <polyline points={points.join(" ")} fill="none" stroke="currentColor" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
