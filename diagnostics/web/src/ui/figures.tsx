// Values in running text and tables: moments with both clocks, ages that grow, durations, sizes.

import type { ComponentChildren, JSX } from "preact";

import { clock } from "../app/preferences";
import { hour, nowS } from "./clocked";
import { ageText, bytesText, countText, durationText, fullTimeText, NOT_KNOWN, timeText } from "./format";

type Seconds = number | null | undefined;

/** A moment; its title has the date, the milliseconds and the other clock too. */
export function TimeText({ at }: { at: Seconds }): JSX.Element {
  if (at === null || at === undefined) {
    return <span class="faint">{NOT_KNOWN}</span>;
  }
  const zone = clock.value;
  void hour.value; // what is of today has no date
  const other = zone === "utc" ? "local" : "utc";
  return (
    <time dateTime={new Date(at * 1000).toISOString()} title={`${fullTimeText(at, zone)}\n${fullTimeText(at, other)}`}>
      {timeText(at, zone, nowS.peek())}
    </time>
  );
}

/** How long ago something was. */
export function Age({ at }: { at: Seconds }): JSX.Element {
  if (at === null || at === undefined) {
    return <span class="faint">{NOT_KNOWN}</span>;
  }
  return (
    <time dateTime={new Date(at * 1000).toISOString()} title={fullTimeText(at, clock.value)}>
      {ageText(nowS.value - at)}
    </time>
  );
}

export function Duration({ seconds }: { seconds: Seconds }): JSX.Element {
  return <span title={typeof seconds === "number" ? `${seconds} s` : undefined}>{durationText(seconds)}</span>;
}

export function Bytes({ value }: { value: Seconds }): JSX.Element {
  return <span title={typeof value === "number" ? `${countText(value)} bytes` : undefined}>{bytesText(value)}</span>;
}

interface FigureProps {
  label: string;
  value: ComponentChildren;
  /** What stands below in small: a rate, a limit. */
  note?: ComponentChildren;
  /** An explanation, shown by the pointer. */
  title?: string;
  tone?: "good" | "warning" | "bad";
  /** 0 to 1: a hairline of progress. */
  progress?: number | null;
}

/** A key figure in a row of them. */
export function Figure({ label, value, note, title, tone, progress }: FigureProps): JSX.Element {
  return (
    <div class={tone === undefined ? "figure" : `figure tone-${tone}`} title={title}>
      <dt>{label}</dt>
      <dd class="figure-value">{value}</dd>
      {note === undefined ? null : <dd class="figure-note">{note}</dd>}
      {typeof progress === "number" ? (
        <dd class="figure-progress" aria-hidden="true">
          <span style={{ width: `${Math.max(0, Math.min(1, progress)) * 100}%` }} />
        </dd>
      ) : null}
    </div>
  );
}

/** Name and value, one below the other: facts about one thing. */
export function Facts({ children }: { children: ComponentChildren }): JSX.Element {
  return <dl class="facts">{children}</dl>;
}

export function Fact({ label, children }: { label: string; children: ComponentChildren }): JSX.Element {
  return (
    <>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </>
  );
}
