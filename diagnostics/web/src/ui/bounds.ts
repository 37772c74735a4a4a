// Bounds of a range, as stored in the URL, as typed and as displayed. Pure functions.

import { countText, minuteText } from "./format.ts";

type Zone = "local" | "utc";

export function isoText(unixS: number): string {
  return new Date(unixS * 1000).toISOString().replace(/\.000Z$/, "Z");
}

const BEFORE = /^-(\d{1,6})([smhd])$/;
const UNIT_S: Readonly<Record<string, number>> = { s: 1, m: 60, h: 3600, d: 86_400 };
const LEAST_PERIOD_S = 10;

/**
 * Return a counter for a range relative to now ("-15m"). It increases by one each time the range has moved by a hundredth of
 * its length, at most every ten seconds. 0 for a fixed range.
 */
export function movesOf(from: string, unixS: number): number {
  const [, count, unit] = BEFORE.exec(from) ?? [];
  const lengthS = Number(count ?? 0) * (UNIT_S[unit ?? ""] ?? 0);
  return lengthS === 0 ? 0 : Math.floor(unixS / Math.max(LEAST_PERIOD_S, lengthS / 100));
}

const LOCAL = /^(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d)(?::(\d\d))?$/;

/**
 * Return typed text as a bound for the URL: "1,200" -> "1200"; "2026-11-23 09:30", read in the zone that the page shows, ->
 * ISO 8601 in UTC. null: the text is not a valid bound.
 */
export function boundOf(text: string, zone: Zone): string | null {
  const plain = text.trim();
  const digits = plain.replace(/[,\u202f ]/g, "");
  if (plain === "" || /^-\d{1,6}[smhd]$/.test(plain)) {
    return plain;
  }
  if (/^\d{1,10}$/.test(digits)) {
    return digits;
  }
  const parts = LOCAL.exec(plain)?.slice(1).map((part) => Number(part ?? 0));
  if (parts !== undefined) {
    const [year = 0, month = 1, day = 1, hours = 0, minutes = 0, seconds = 0] = parts;
    const at =
      zone === "utc"
        ? Date.UTC(year, month - 1, day, hours, minutes, seconds)
        : new Date(year, month - 1, day, hours, minutes, seconds).getTime();
    return isoText(at / 1000);
  }
  const at = /Z$|[+-]\d\d:\d\d$/.test(plain) ? Date.parse(plain) : Number.NaN;
  return Number.isNaN(at) ? null : isoText(at / 1000);
}

/** Return a bound of the URL as displayed: "step 1,200", "2026-11-23 09:30". */
export function boundText(bound: string, zone: Zone): string {
  if (/^\d+$/.test(bound)) {
    return `step ${countText(Number(bound))}`;
  }
  const at = Date.parse(bound);
  return bound.startsWith("-") || Number.isNaN(at) ? bound : minuteText(at / 1000, zone);
}
