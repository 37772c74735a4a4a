// The query of the timeline and its visible part; all of it is in the URL.

import type { Query } from "../../api/client";
import { shownRound } from "../../app/job";
import { rangeQuery } from "../../app/range";
import { numberOf, route, useNumberParam, useParam } from "../../app/location";

export interface TimelineChoice {
  first: number | null;
  last: number | null;
  /** For example "0:7,16"; empty: the server selects ranks around `rank`. */
  ranks: string;
  rank: number | null;
  /** The visible part in ns from the start of the picture; null: all of it. */
  fromNs: number | null;
  toNs: number | null;
  search: string;
  hasFlows: boolean;
  hasIdeal: boolean;
  hasCritical: boolean;
}

export function useTimelineChoice(): TimelineChoice {
  const [first] = useNumberParam("first");
  const [last] = useNumberParam("last");
  const [rank] = useNumberParam("rank");
  const [ranks] = useParam("ranks", "");
  const [fromNs] = useNumberParam("t0");
  const [toNs] = useNumberParam("t1");
  const [search] = useParam("find", "");
  const [flows] = useParam("flows", "1");
  const [ideal] = useParam("ideal", "0");
  const [critical] = useParam("critical", "0");
  return {
    first, last, ranks, rank, fromNs, toNs, search,
    hasFlows: flows === "1", hasIdeal: ideal === "1", hasCritical: critical === "1",
  };
}

export function slicesQuery(choice: TimelineChoice): Query {
  return {
    round: shownRound.value?.number,
    first: choice.first,
    last: choice.last,
    ...(choice.first === null && choice.last === null ? rangeQuery() : {}),
    ranks: choice.ranks === "" ? null : choice.ranks,
    rank: choice.ranks === "" ? choice.rank : null,
  };
}

/** Return the part that the URL names now, [t0, t1]; the props of a component may be older. */
export function partOfUrl(): [number | null, number | null] {
  const { params } = route.peek();
  return [numberOf(params, "t0"), numberOf(params, "t1")];
}
