// The range that all views share: one bar on top of each view, which also says what the view makes of it.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import { Segmented, Select } from "../ui/controls";
import { useRoute } from "./location";
import { clock } from "./preferences";
import { boundOf, boundText } from "../ui/bounds";
import { axis, isWholeRun, range, setAxis, setRange } from "./range";

const PRESETS = [
  { value: "", label: "the whole run" },
  { value: "-15m", label: "last 15 minutes" },
  { value: "-1h", label: "last hour" },
  { value: "-6h", label: "last 6 hours" },
  { value: "-1d", label: "last day" },
];
const CUSTOM = "custom";

/** Views about one moment, or about no time at all: the range changes nothing there. */
const WITHOUT = ["incidents/", "runbooks", "runbooks/"];

/** Why a view shows what it shows whatever the range is, said where somebody has chosen one. Views that are not here obey it. */
const UNMOVED: Record<string, string> = {
  hosts: "Hosts are shown as they are now. The page of a host has its GPUs and links in this range.",
  grid: "Ranks are shown where they are now, or where the chosen round ended.",
  actions: "Actions are about the job as it is now.",
};
const PARTLY: Record<string, string> = {
  "hosts/": "GPUs and links are those of this range, or of its last day. Heartbeats and checks are those of now.",
  overview: "Charts, marks and notes obey it. The answers on top are about now.",
  stragglers: "What-if replays steps of this range. Findings and scores are those of the newest steps that were judged.",
  timeline: "Steps are chosen from this range; a step that the address names is shown wherever it lies.",
  heat: "Of this range the newest steps that fit are shown. Draw over a part to see it alone.",
  logs: "Lines are those of this range, within the chosen round. Causes are judged over the whole round.",
  checkpoints: "Those written in this range, and the one that a restart would go on from.",
};

/** Views that draw over steps or over time, as is chosen. */
const WITH_AXIS = ["overview", "heat"];

const AXES = [
  { value: "step", label: "steps", title: "charts go over steps" },
  { value: "time", label: "time", title: "charts go over wall-clock time; gaps are gaps" },
];

function Custom({ onDone }: { onDone: () => void }): JSX.Element {
  const [from, setFrom] = useState(range.value.from === "" ? "" : boundText(range.value.from, clock.value).replace(/^step /, ""));
  const [to, setTo] = useState(range.value.to === "" ? "" : boundText(range.value.to, clock.value).replace(/^step /, ""));
  const [problem, setProblem] = useState("");
  const take = (): void => {
    const [first, last] = [boundOf(from, clock.value), boundOf(to, clock.value)];
    if (first === null || last === null) {
      setProblem(`"${first === null ? from : to}" is neither a step nor a time; write 1200, or 2026-11-23 09:30`);
    } else if (last.startsWith("-")) {
      setProblem("A range ends at a step or a time; leave its end empty for now.");
    } else {
      setRange(first, last);
      onDone();
    }
  };
  const field = (label: string, value: string, set: (value: string) => void, placeholder: string): JSX.Element => (
    <label class="field inline">
      <span>{label}</span>
      <input
        type="text"
        size={16}
        value={value}
        placeholder={placeholder}
        autocomplete="off"
        spellcheck={false}
        onInput={(event) => set(event.currentTarget.value)}
      />
    </label>
  );
  return (
    <form
      class="range-custom"
      aria-label="Range from and to"
      onSubmit={(event) => {
        event.preventDefault();
        take();
      }}
    >
      {field("from", from, setFrom, "step, or time")}
      {field("to", to, setTo, "empty: now")}
      <span class="faint">{clock.value === "utc" ? "times in UTC" : "times of this machine"}</span>
      <button type="submit" class="button small">
        Show
      </button>
      {problem === "" ? null : (
        <span class="tone-text-bad" role="alert">
          {problem}
        </span>
      )}
    </form>
  );
}

export function RangeBar(): JSX.Element | null {
  const { from, to } = range.value;
  const { view, rest } = useRoute();
  const [isTyping, setIsTyping] = useState(false);
  const place = rest.length === 0 ? view : `${view}/`;
  if (WITHOUT.includes(place) || (isWholeRun.value && place in UNMOVED)) {
    return null;
  }
  const isPreset = to === "" && PRESETS.some((one) => one.value === from);
  const label = isPreset ? "custom\u2026" : `${boundText(from, clock.value) || "begin"} to ${boundText(to, clock.value) || "now"}`;
  const note = isWholeRun.value ? undefined : (UNMOVED[place] ?? PARTLY[place]);
  return (
    <div class="range-bar" role="group" aria-label="Range of all views">
      <Select
        label="Range"
        options={[...PRESETS, { value: CUSTOM, label }]}
        value={isTyping || !isPreset ? CUSTOM : from}
        onChange={(value) => {
          setIsTyping(value === CUSTOM);
          if (value !== CUSTOM) {
            setRange(value);
          }
        }}
      />
      {isTyping ? <Custom onDone={() => setIsTyping(false)} /> : null}
      {isPreset || isTyping ? null : (
        <>
          <button type="button" class="button small" onClick={() => setIsTyping(true)}>
            Change
          </button>
          <button type="button" class="button small" onClick={() => setRange("")}>
            Show all
          </button>
        </>
      )}
      {WITH_AXIS.includes(place) ? (
        <Segmented label="What charts go over" options={AXES} value={axis.value} onChange={(value) => setAxis(value === "time" ? "time" : "step")} />
      ) : null}
      {note === undefined ? null : <span class="range-note">{note}</span>}
    </div>
  );
}
