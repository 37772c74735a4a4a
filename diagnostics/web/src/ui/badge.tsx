// A state as shape and word; colour only repeats it.

import type { ComponentChildren, JSX } from "preact";

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

export const HEALTH: Readonly<Record<string, { tone: Tone; shape: Shape; word: string }>> = {
  good: { tone: "good", shape: "circle", word: "healthy" },
  warning: { tone: "warning", shape: "triangle", word: "attention" },
  bad: { tone: "bad", shape: "octagon", word: "unhealthy" },
  over: { tone: "quiet", shape: "ring", word: "over" },
  unknown: { tone: "bad", shape: "dashes", word: "not known" },
};

/** The health of the job: its word is of its own, `state` says what it does. */
export function HealthBadge({ health, state }: { health: string; state: string }): JSX.Element {
  const known = HEALTH[health] ?? { tone: "quiet" as const, shape: "dashes" as const, word: health };
  return (
    <span class={`health tone-${known.tone}`} data-health={health}>
      <ShapeIcon shape={known.shape} />
      <strong>{known.word}</strong>
      <span class="health-state">{state}</span>
    </span>
  );
}
