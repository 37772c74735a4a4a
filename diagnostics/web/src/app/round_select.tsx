// Selects the round that is shown: the newest, or an older one. The selection is kept when another view is opened.

import type { JSX } from "preact";

import { Select } from "../ui/controls";
import { countText } from "../ui/format";
import { job, shownRound } from "./job";
import { setParams } from "./location";

export function RoundSelect(): JSX.Element | null {
  const all = job.value?.rounds ?? [];
  const newest = all[all.length - 1];
  if (all.length < 2 || newest === undefined) {
    return null;
  }
  const options = [...all].reverse().map((one) => ({
    value: String(one.number),
    label:
      one === newest
        ? `${one.number}, the newest`
        : `${one.number}: steps ${countText(one.first_step)} to ${countText(one.last_step)}`,
  }));
  return (
    <Select
      label="Round"
      options={options}
      value={String(shownRound.value?.number ?? newest.number)}
      onChange={(value) => setParams({ round: value === String(newest.number) ? null : value }, { isNewEntry: true })}
    />
  );
}
