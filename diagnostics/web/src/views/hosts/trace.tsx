// A value of a table with the line of its history.

import "./trace.css";

import type { ComponentChildren, JSX } from "preact";

import { Sparkline } from "../../ui/bars";

interface TraceProps {
  text: ComponentChildren;
  history: readonly (number | null)[];
  label: string;
  leastSpan: number;
}

/** A value and the line of its history. */
export function Trace({ text, history, label, leastSpan }: TraceProps): JSX.Element {
  return (
    <span class="trace">
      <span class="number">{text}</span>
      <Sparkline values={history} label={label} leastSpan={leastSpan} />
    </span>
  );
}
