// The part of the run that all views show, and the axis of charts (steps or time). Both are in the URL and apply to all views.
//
//   ?from=-15m      ?from=1200&to=1800      ?from=2026-11-23T09:30:00Z&to=2026-11-23T10:00:00Z      &axis=time

import { computed } from "@preact/signals";

import type { Query } from "../api/client";
import type { Axis } from "../ui/chart-scale";
import { connection } from "../api/live";
import { isoText, movesOf } from "../ui/bounds";
import { recentS } from "../ui/clocked";
import { route, setParams } from "./location";
import { chartAxis } from "./preferences";

export interface Range {
  from: string;
  to: string;
}

export const range = computed<Range>(() => {
  const { params } = route.value;
  return { from: params.get("from") ?? "", to: params.get("to") ?? "" };
});
export const isWholeRun = computed(() => range.value.from === "" && range.value.to === "");

/** The query parameters of the range, for requests about a part of the run. */
export function rangeQuery(): Query {
  return { from: range.value.from, to: range.value.to };
}

/** Increases while the range moves with the clock, so that views read again even if the server reports no change. */
export const rangeMoves = computed(() => {
  const { from } = range.value;
  return from.startsWith("-") && connection.value === "live" ? movesOf(from, recentS.value) : 0;
});

/** The axis of charts: from the URL, else the last choice. */
export const axis = computed<Axis>(() => {
  const named = route.value.params.get("axis");
  return named === "time" || named === "step" ? named : chartAxis.value;
});

export function setAxis(next: Axis): void {
  chartAxis.value = next;
  setParams({ axis: next });
}

export function setRange(from: string | number, to: string | number = ""): void {
  setParams({ from, to }, { isNewEntry: true });
}

/** Set the range to the part between two steps, or two times. */
export function setRangeOf(of: Axis, first: number, last: number): void {
  if (of === "step") {
    setRange(Math.max(0, Math.floor(first)), Math.ceil(last));
  } else {
    setRange(isoText(first), isoText(last));
  }
}
