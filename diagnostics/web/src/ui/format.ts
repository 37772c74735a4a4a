// Numbers, durations, sizes and times as text: three significant digits, and a narrow space before the unit.

import type { ThresholdsDocument } from "../api/documents";

export const NOT_KNOWN = "\u2013";
const NARROW_SPACE = "\u202f";

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 1234567 -> "1,234,567" */
export function countText(value: number | null | undefined): string {
  return value === null || value === undefined ? NOT_KNOWN : grouped.format(value);
}

/** count, "step" -> "1 step", "3,000 steps" */
export function countOf(value: number, thing: string): string {
  return `${countText(value)} ${thing}${value === 1 ? "" : "s"}`;
}

/** At least `digits` significant digits, with an exponent only below 0.0001: 0.0123, 1.23, 12.3, 123, 1,234. */
export function numberText(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return NOT_KNOWN;
  }
  const size = Math.abs(value);
  if (size === 0) {
    return "0";
  }
  if (size < 1e-4) {
    return value.toExponential(digits - 1);
  }
  const before = Math.floor(Math.log10(Number(size.toPrecision(digits)))) + 1;
  const after = Math.max(0, Math.min(6, digits - before));
  return value.toLocaleString("en-US", { minimumFractionDigits: after, maximumFractionDigits: after });
}

const LARGE = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
] as const;

/** 12345678 -> "12.3 M" */
export function largeText(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return NOT_KNOWN;
  }
  for (const [size, letter] of LARGE) {
    if (Math.abs(value) >= size) {
      return `${numberText(value / size)}${NARROW_SPACE}${letter}`;
    }
  }
  return Number.isInteger(value) ? countText(value) : numberText(value);
}

const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"] as const;
const MEMORY_SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] as const;

function sizeText(value: number | null | undefined, base: number, units: readonly string[]): string {
  if (value === null || value === undefined) {
    return NOT_KNOWN;
  }
  let left = value;
  let index = 0;
  while (Math.abs(left) >= 999.5 && index < units.length - 1) {
    left /= base;
    index += 1;
  }
  return `${index === 0 ? countText(left) : numberText(left)}${NARROW_SPACE}${units[index] ?? "B"}`;
}

/** Sizes of files, disks and messages, in powers of 1000 as in the log: 1550000 -> "1.55 MB" */
export function bytesText(value: number | null | undefined): string {
  return sizeText(value, 1000, SIZES);
}

/** Sizes of memory, in powers of 1024 as in its drivers: 85899345920 -> "80.0 GiB" */
export function memoryText(value: number | null | undefined): string {
  return sizeText(value, 1024, MEMORY_SIZES);
}

function twoParts(large: number, largeUnit: string, small: number, smallUnit: string): string {
  const rest = small === 0 ? "" : ` ${small}${NARROW_SPACE}${smallUnit}`;
  return `${large}${NARROW_SPACE}${largeUnit}${rest}`;
}

/** Seconds, in microseconds up to days: "412 ms", "3.21 s", "2 min 5 s", "1 h 4 min", "3 d 4 h". */
export function durationText(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) {
    return NOT_KNOWN;
  }
  const size = Math.abs(seconds);
  const sign = seconds < 0 ? "-" : "";
  if (size === 0) {
    return `0${NARROW_SPACE}s`;
  }
  if (size < 1e-3) {
    return `${sign}${numberText(size * 1e6)}${NARROW_SPACE}\u00b5s`;
  }
  if (size < 0.9995) {
    return `${sign}${numberText(size * 1e3)}${NARROW_SPACE}ms`;
  }
  if (size < 99.95) {
    return `${sign}${numberText(size)}${NARROW_SPACE}s`;
  }
  const whole = Math.round(size);
  if (whole < 3600) {
    return sign + twoParts(Math.floor(whole / 60), "min", whole % 60, "s");
  }
  const minutes = Math.round(size / 60);
  if (minutes < 48 * 60) {
    return sign + twoParts(Math.floor(minutes / 60), "h", minutes % 60, "min");
  }
  const hours = Math.round(size / 3600);
  return sign + twoParts(Math.floor(hours / 24), "d", hours % 24, "h");
}

/** A rounded age: below 3 s it is "just now"; from ten hours on without minutes, from ten days on without hours. */
export function ageText(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) {
    return NOT_KNOWN;
  }
  const age = Math.max(0, seconds);
  if (age < 3) {
    return "just now";
  }
  if (age < 100) {
    return `${Math.round(age)}${NARROW_SPACE}s ago`;
  }
  if (age < 36_000) {
    return `${durationText(Math.round(age / 60) * 60)} ago`;
  }
  if (age < 864_000) {
    return `${durationText(Math.round(age / 3600) * 3600)} ago`;
  }
  return `${countText(Math.round(age / 86_400))}${NARROW_SPACE}d ago`;
}

/** 0.3712 -> "37.1 %" */
export function percentText(ratio: number | null | undefined): string {
  return ratio === null || ratio === undefined ? NOT_KNOWN : `${numberText(ratio * 100)}${NARROW_SPACE}%`;
}

/** A straggler score, always with two decimals so that scores are easy to compare. */
export function scoreText(score: number | null | undefined): string {
  return score === null || score === undefined ? NOT_KNOWN : score.toFixed(2);
}

/** The thresholds from which a host or rank is a straggler, in the wording of all views. */
export function thresholdsText(least: ThresholdsDocument | null): string {
  return least === null
    ? "nothing judged yet"
    : `a straggler has a score of at least ${scoreText(least.score)} and takes at least ${numberText(least.excess * 100)}${NARROW_SPACE}% longer, for ${least.num_steps} steps`;
}

/** "hosts made the job slow" -> "Hosts made the job slow" */
export function sentence(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/** A ratio, with the times sign behind it. */
export function timesText(ratio: number | null | undefined, digits = 3): string {
  return ratio === null || ratio === undefined ? NOT_KNOWN : `${ratio.toFixed(digits)}\u00d7`;
}

type Zone = "local" | "utc";

const formats = new Map<string, Intl.DateTimeFormat>();

function format(zone: Zone, parts: Intl.DateTimeFormatOptions): Intl.DateTimeFormat {
  const key = `${zone} ${JSON.stringify(parts)}`;
  let found = formats.get(key);
  if (found === undefined) {
    const options: Intl.DateTimeFormatOptions = { ...parts, hourCycle: "h23" };
    if (zone === "utc") {
      options.timeZone = "UTC";
    }
    found = new Intl.DateTimeFormat("sv-SE", options); // this locale formats as 2026-11-21 14:05:09
    formats.set(key, found);
  }
  return found;
}

const DATE = { year: "numeric", month: "2-digit", day: "2-digit" } as const;
const TIME = { hour: "2-digit", minute: "2-digit", second: "2-digit" } as const;

/** "14:05:09", preceded by the date unless it is today. */
export function timeText(unixS: number | null | undefined, zone: Zone, nowS: number = Date.now() / 1000): string {
  if (unixS === null || unixS === undefined) {
    return NOT_KNOWN;
  }
  const moment = new Date(unixS * 1000);
  const day = format(zone, DATE);
  const time = format(zone, TIME).format(moment);
  const isToday = day.format(moment) === day.format(new Date(nowS * 1000));
  return isToday ? time : `${day.format(moment)} ${time}`;
}

function msText(unixS: number): string {
  return String(Math.floor((unixS * 1000) % 1000)).padStart(3, "0");
}

/** The time of day alone, to the millisecond: "14:05:09.123". */
export function clockText(unixS: number, zone: Zone): string {
  return `${format(zone, TIME).format(new Date(unixS * 1000))}.${msText(unixS)}`;
}

/** Date and time to the minute: "2026-11-29 17:30". */
export function minuteText(unixS: number, zone: Zone): string {
  const moment = new Date(unixS * 1000);
  return `${format(zone, DATE).format(moment)} ${format(zone, { hour: "2-digit", minute: "2-digit" }).format(moment)}`;
}

/** The dates of a period: "2026-11-21", or "2026-11-21 to 2026-11-22". */
export function daysText(firstUnixS: number, lastUnixS: number, zone: Zone): string {
  const day = format(zone, DATE);
  const [first, last] = [day.format(new Date(firstUnixS * 1000)), day.format(new Date(lastUnixS * 1000))];
  return first === last ? first : `${first} to ${last}`;
}

/** Date, time and zone, for tooltips: "2026-11-21 14:05:09.123 UTC". */
export function fullTimeText(unixS: number, zone: Zone): string {
  const moment = new Date(unixS * 1000);
  const text = `${format(zone, DATE).format(moment)} ${format(zone, TIME).format(moment)}.${msText(unixS)}`;
  return `${text} ${zone === "utc" ? "UTC" : "local time"}`;
}

/** [0, 1, 2, 5] -> "0-2, 5", with at most `most` parts. */
export function ranksText(ranks: readonly number[], most = 6): string {
  const parts: string[] = [];
  let index = 0;
  while (index < ranks.length) {
    const first = ranks[index] ?? 0;
    let last = first;
    while (index + 1 < ranks.length && ranks[index + 1] === last + 1) {
      index += 1;
      last += 1;
    }
    parts.push(first === last ? `${first}` : `${first}-${last}`);
    index += 1;
  }
  const shown = parts.slice(0, most);
  return parts.length > most ? `${shown.join(", ")} and more` : shown.join(", ");
}
