// The search in a timeline: its conditions, and the slices that match them.

import { rankOfLine, type TimelinePicture } from "./timeline-picture.ts";

/** The conditions of a search: parts of operation names, and numbers of rank, micro-batch, step and chunk. */
export interface Search {
  words: string[];
  rank: number | null;
  microbatch: number | null;
  step: number | null;
  chunk: number | null;
}

const NUMBERED = /^([a-z]+)[:=]?(\d{1,9})$/;
const FIELDS = new Map<string, "rank" | "microbatch" | "step" | "chunk">([
  ["rank", "rank"], ["r", "rank"], ["microbatch", "microbatch"], ["mb", "microbatch"], ["m", "microbatch"],
  ["step", "step"], ["s", "step"], ["chunk", "chunk"], ["c", "chunk"],
]);

/** Parse a search such as "forward rank:3 mb:2". A slice must match all conditions; null if the text is empty. */
export function parseSearch(text: string): Search | null {
  const search: Search = { words: [], rank: null, microbatch: null, step: null, chunk: null };
  const parts = text.trim().toLowerCase().split(/\s+/).filter((part) => part !== "");
  for (const part of parts) {
    const match = NUMBERED.exec(part);
    const field = FIELDS.get(match?.[1] ?? "");
    if (field === undefined) {
      search.words.push(part);
    } else {
      search[field] = Number(match?.[2]);
    }
  }
  return parts.length === 0 ? null : search;
}

/** Return 1 for each slice that matches a search. */
export function findSlices(picture: TimelinePicture, search: Search): Uint8Array {
  const isNamed = new Uint8Array(256);
  for (let number = 0; number < 256; number += 1) {
    const name = picture.operations[String(number)] ?? `operation-${number}`;
    isNamed[number] = search.words.every((word) => name.includes(word)) ? 1 : 0;
  }
  const found = new Uint8Array(picture.numSlices);
  for (let line = 0; line < picture.lineTrack.length; line += 1) {
    if (search.rank !== null && rankOfLine(picture, line) !== search.rank) {
      continue;
    }
    const last = picture.lineFirst[line + 1] ?? 0;
    for (let slice = picture.lineFirst[line] ?? 0; slice < last; slice += 1) {
      const isFound = isNamed[picture.operation[slice] as number] === 1
        && (search.microbatch === null || picture.microbatch[slice] === search.microbatch)
        && (search.step === null || picture.step[slice] === search.step)
        && (search.chunk === null || picture.chunk[slice] === search.chunk);
      found[slice] = isFound ? 1 : 0;
    }
  }
  return found;
}

/** Return the found slices ordered by time, then by line: the order of Previous and Next. */
export function inOrderOfTime(picture: TimelinePicture, found: Uint8Array): Int32Array {
  const slices: number[] = [];
  for (let slice = 0; slice < found.length; slice += 1) {
    if (found[slice] === 1) {
      slices.push(slice);
    }
  }
  slices.sort((a, b) => (picture.begin[a] as number) - (picture.begin[b] as number) || a - b);
  return Int32Array.from(slices);
}
