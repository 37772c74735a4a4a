// A state as shape and word; colour only repeats it.

import type { ComponentChildren, JSX } from "preact";

import type { OverviewDocument } from "../api/documents";
import { ShapeIcon, type Shape } from "./icons";

export type Tone = "good" | "warning" | "bad" | "accent" | "quiet";

interface BadgeProps {
  tone: Tone;
  shape: Shape;
  children: ComponentChildren;
  title?: string;
}

export function Badge({ tone, shape, children, title }: BadgeProps): JSX.Element {
  return (
    <span class={`badge tone-${tone}`} title={title}>
      <ShapeIcon shape={shape} />
      <span>{children}</span>
    </span>
  );
}

export type Health = "good" | "warning" | "bad" | "over" | "unknown";

const OVER: readonly string[] = ["finished", "saved and stopped", "not running"];

/** A job's health as the page shows it: its level, but a job that is well because it is over, or whose state is unknown, looks different. */
export function healthOf({ level, state }: Pick<OverviewDocument, "level" | "state">): Health {
  if (state === "unknown") {
    return "unknown";
  }
  if (level !== "green") {
    return level === "red" ? "bad" : "warning";
  }
  return OVER.includes(state) ? "over" : "good";
}

export const HEALTH: Readonly<Record<Health, { tone: Tone; shape: Shape; word: string }>> = {
  good: { tone: "good", shape: "circle", word: "healthy" },
  warning: { tone: "warning", shape: "triangle", word: "attention" },
  bad: { tone: "bad", shape: "octagon", word: "unhealthy" },
  over: { tone: "quiet", shape: "ring", word: "over" },
  unknown: { tone: "bad", shape: "dashes", word: "not known" },
};

/** The health of the job: its word is of its own, `state` says what it does. */
export function HealthBadge({ told }: { told: Pick<OverviewDocument, "level" | "state"> }): JSX.Element {
  const health = healthOf(told);
  const known = HEALTH[health];
  return (
    <span class={`health tone-${known.tone}`} data-health={health}>
      <ShapeIcon shape={known.shape} />
      <strong>{known.word}</strong>
      <span class="health-state">{told.state}</span>
    </span>
  );
}
