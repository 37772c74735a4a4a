// Values in text and tables: times with local time and UTC, ages, durations, sizes.

import type { ComponentChildren, JSX } from "preact";

import { clock } from "../app/preferences";
import { hour, nowS } from "./clocked";
import { ageText, bytesText, countText, durationText, fullTimeText, NOT_KNOWN, timeText } from "./format";

type Seconds = number | null | undefined;

/** A time; its tooltip has the date and milliseconds, in local time and in UTC. */
export function TimeText({ at }: { at: Seconds }): JSX.Element {
  if (at === null || at === undefined) {
    return <span class="faint">{NOT_KNOWN}</span>;
  }
  const zone = clock.value;
  void hour.value; // today's times have no date, so the text depends on the current day
  const other = zone === "utc" ? "local" : "utc";
  return (
    <time dateTime={new Date(at * 1000).toISOString()} title={`${fullTimeText(at, zone)}\n${fullTimeText(at, other)}`}>
      {timeText(at, zone, nowS.peek())}
    </time>
  );
}

/** The age of something. */
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
  /** Small text below: a rate, a limit. */
  note?: ComponentChildren;
  /** An explanation, shown as a tooltip. */
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

/** A list of names and values about one object. */
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
