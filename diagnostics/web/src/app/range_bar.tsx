// The bar above each view that sets the range shared by all views. Its note describes how the view applies the range.

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

/** Views without the bar: they show one point in time, or nothing that depends on time. */
const WITHOUT = ["incidents/", "runbooks", "runbooks/"];

/** Notes of views that ignore the range, shown when one is set. Views in neither map apply it fully. */
const WITHOUT_EFFECT: Record<string, string> = {
  hosts: "Hosts are shown as they are now. The page of a host shows its data, GPUs and links in this range.",
  ranks: "Ranks are shown in their current state, or in their last state of the selected round.",
  actions: "Actions apply to the job in its current state.",
};
/** Notes of views that apply the range only in part. */
const PARTLY: Record<string, string> = {
  "hosts/": "GPUs and links show this range, at most its last day; data shows its last 240 steps. Heartbeats and checks are current.",
  overview: "Charts, marks and notes show this range. The answers at the top are current.",
  stragglers: "What-if replays steps of this range. Findings and scores cover the newest judged steps.",
  timeline: "Steps are selected from this range; a step named in the URL is shown even outside it.",
  heat: "Shows as many of the newest steps of this range as fit. Drag over a part to zoom in.",
  logs: "Lines are from this range of the selected round. Causes are determined over the whole round.",
  checkpoints: "Shows checkpoints written in this range, and the one that a restart would resume from.",
};

/** Views whose charts can have steps or time as their axis. */
const WITH_AXIS = ["overview", "heat"];

const AXES = [
  { value: "step", label: "steps", title: "x axis of charts: steps" },
  { value: "time", label: "time", title: "x axis of charts: wall-clock time, with gaps where nothing was trained" },
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
      setProblem("The end of a range is a step or a time; leave it empty for \"now\".");
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
      aria-label="Custom range"
      onSubmit={(event) => {
        event.preventDefault();
        take();
      }}
    >
      {field("from", from, setFrom, "step or time")}
      {field("to", to, setTo, "empty: now")}
      <span class="faint">{clock.value === "utc" ? "times in UTC" : "local times"}</span>
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
  if (WITHOUT.includes(place) || (isWholeRun.value && place in WITHOUT_EFFECT)) {
    return null;
  }
  const isPreset = to === "" && PRESETS.some((one) => one.value === from);
  const label = isPreset ? "custom\u2026" : `${boundText(from, clock.value) || "start"} to ${boundText(to, clock.value) || "now"}`;
  const note = isWholeRun.value ? undefined : (WITHOUT_EFFECT[place] ?? PARTLY[place]);
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
        <Segmented label="Axis of charts" options={AXES} value={axis.value} onChange={(value) => setAxis(value === "time" ? "time" : "step")} />
      ) : null}
      {note === undefined ? null : <span class="range-note">{note}</span>}
    </div>
  );
}
