// A state shown by shape and word; the color is redundant.

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

/** A job's health as the page shows it: its level, with separate values for a green job that is over and for an unknown state. */
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
  unknown: { tone: "bad", shape: "dashes", word: "unknown" },
};

/** The health of the job as a word, followed by the job's state. */
export function HealthBadge({ status }: { status: Pick<OverviewDocument, "level" | "state"> }): JSX.Element {
  const health = healthOf(status);
  const known = HEALTH[health];
  return (
    <span class={`health tone-${known.tone}`} data-health={health}>
      <ShapeIcon shape={known.shape} />
      <strong>{known.word}</strong>
      <span class="health-state">{status.state}</span>
    </span>
  );
}
