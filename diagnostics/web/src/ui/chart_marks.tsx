// Marks above a chart: one symbol for each occurrence. Marks that share a position show the most severe one and their number.

import type { JSX } from "preact";
import { useState } from "preact/hooks";

import type { MarkDocument } from "../api/documents";
import { hrefOf } from "../app/location";
import { token } from "../app/preferences";
import { setRangeOf } from "../app/range";
import { extentOf, MARK_KINDS, type Axis, type MarkGroup } from "./chart-scale";
import { countText } from "./format";
import { ShapeIcon, type Shape } from "./icons";

type Kind = MarkDocument["kind"];

const SIGNS: Record<Kind, { shape: Shape; color: string; label: string }> = {
  incident: { shape: "octagon", color: "--bad", label: "incidents" },
  bad: { shape: "triangle", color: "--bad", label: "non-finite values" },
  note: { shape: "diamond", color: "--accent", label: "notes" },
  config: { shape: "square", color: "--warning", label: "configuration" },
  round: { shape: "ring", color: "--ink-faint", label: "new rounds" },
  checkpoint: { shape: "circle", color: "--good", label: "checkpoints" },
};
const MOST_LINES = 6;

export function markColor(kind: Kind): string {
  return token(SIGNS[kind].color);
}

/** Return the link of a mark. */
export function markHref(mark: MarkDocument): string {
  switch (mark.kind) {
    case "incident":
      return hrefOf(mark.ref === "" ? ["incidents"] : ["incidents", mark.ref]);
    case "note":
      return hrefOf("notes", { note: mark.ref });
    case "config":
      return hrefOf("notes", { change: mark.ref });
    case "checkpoint":
      return hrefOf("checkpoints");
    case "round":
      return hrefOf("heat", { round: mark.ref });
    case "bad":
      return hrefOf("logs");
  }
}

/** Return the texts of the marks in a group, one per line. */
function wholeText(group: MarkGroup): string {
  const shown = group.marks.slice(0, MOST_LINES).map((mark) => mark.text);
  const rest = group.marks.length - shown.length;
  return [...shown, ...(rest > 0 ? [`and ${countText(rest)} more`] : [])].join("\n");
}

/** Return a group in one line: the most severe mark, and the number of others. */
export function markText(group: MarkGroup): string {
  const rest = group.count - group.mark.count;
  return rest > 0 ? `${group.mark.text}, and ${countText(rest)} more` : group.mark.text;
}

interface LaneProps {
  groups: readonly MarkGroup[];
  /** Pixels from the left edge of the chart to where its scale begins. */
  left: number;
  axis: Axis;
}

/** For pointers only; the list of marks has the same content for keyboards and screen readers. */
export function MarkLane({ groups, left, axis }: LaneProps): JSX.Element {
  const [opened, setOpened] = useState<MarkGroup | null>(null);
  const open = (event: MouseEvent, group: MarkGroup): void => {
    // touch has no hover: the first tap shows the text, the second follows the link
    const isTouch = (event as PointerEvent).pointerType === "touch";
    if (isTouch && opened !== group) {
      event.preventDefault();
      setOpened(group);
    } else if (group.count > 1) {
      event.preventDefault();
      setRangeOf(axis, ...extentOf(group, axis));
    }
  };
  return (
    <div class="mark-lane" aria-hidden="true">
      {groups.map((group) => (
        <a
          key={`${group.mark.kind} ${group.mark.ref} ${group.x}`}
          class={`mark mark-${group.mark.kind}`}
          style={{ left: `${left + group.x}px`, color: `var(${SIGNS[group.mark.kind].color})` }}
          href={markHref(group.mark)}
          tabIndex={-1}
          title={wholeText(group)}
          data-mark={group.mark.kind}
          onClick={(event) => open(event, group)}
        >
          <ShapeIcon shape={SIGNS[group.mark.kind].shape} />
          {group.count > 1 && group.marks.some((mark) => mark.kind !== "checkpoint") ? (
            <span class="mark-count">{group.count > 99 ? "99+" : group.count}</span>
          ) : null}
        </a>
      ))}
      {opened === null || !groups.includes(opened) ? null : <p class="mark-text">{wholeText(opened)}</p>}
    </div>
  );
}

interface LegendProps {
  marks: readonly MarkDocument[];
  hidden: readonly string[];
  onChange: (hidden: string[]) => void;
}

/** The kinds of marks on the charts; each can be switched on and off. */
export function MarkLegend({ marks, hidden, onChange }: LegendProps): JSX.Element {
  const counts = new Map<Kind, number>();
  for (const mark of marks) {
    counts.set(mark.kind, (counts.get(mark.kind) ?? 0) + mark.count);
  }
  return (
    <fieldset class="mark-legend">
      <legend class="visually-hidden">Marks on the charts</legend>
      {MARK_KINDS.filter((kind) => counts.has(kind))
        .map((kind) => (
          <label key={kind} class={hidden.includes(kind) ? "is-off" : ""}>
            <input
              type="checkbox"
              checked={!hidden.includes(kind)}
              onChange={(event) =>
                onChange(event.currentTarget.checked ? hidden.filter((one) => one !== kind) : [...hidden, kind])
              }
            />
            <span style={{ color: `var(${SIGNS[kind].color})` }}>
              <ShapeIcon shape={SIGNS[kind].shape} />
            </span>
            {SIGNS[kind].label} <span class="faint">{countText(counts.get(kind) ?? 0)}</span>
          </label>
        ))}
    </fieldset>
  );
}
