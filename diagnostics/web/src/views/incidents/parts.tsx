// Components shared by the list and the pages of incidents and verdicts.

import type { JSX } from "preact";

import { hrefOf } from "../../app/location";
import { Badge, type Tone } from "../../ui/badge";
import type { Shape } from "../../ui/icons";

const STATES: Record<string, { tone: Tone; shape: Shape }> = {
  open: { tone: "bad", shape: "octagon" },
  recovered: { tone: "good", shape: "circle" },
  stopped: { tone: "warning", shape: "square" },
  held: { tone: "quiet", shape: "ring" },
};

export function StateBadge({ state }: { state: string }): JSX.Element {
  const known = STATES[state] ?? { tone: "quiet" as const, shape: "dashes" as const };
  return (
    <Badge tone={known.tone} shape={known.shape}>
      {state}
    </Badge>
  );
}

const OUTCOMES: Record<string, { tone: Tone; shape: Shape; word: string }> = {
  "acted": { tone: "good", shape: "circle", word: "acted on" },
  "waiting": { tone: "warning", shape: "triangle", word: "waiting for a decision" },
  "dry-run": { tone: "quiet", shape: "diamond", word: "would have acted" },
  "declined": { tone: "quiet", shape: "ring", word: "declined" },
  "": { tone: "quiet", shape: "dashes", word: "not decided" },
};

/** The driver's outcome of a verdict. */
export function OutcomeBadge({ outcome }: { outcome: string }): JSX.Element {
  const known = OUTCOMES[outcome] ?? { tone: "quiet" as const, shape: "dashes" as const, word: outcome };
  return (
    <Badge tone={known.tone} shape={known.shape}>
      {known.word}
    </Badge>
  );
}

export function HostLinks({ hosts, most = 3 }: { hosts: readonly string[]; most?: number }): JSX.Element {
  return (
    <span class="links">
      {hosts.slice(0, most).map((host) => (
        <a key={host} href={hrefOf(["hosts", host])}>
          {host}
        </a>
      ))}
      {hosts.length > most ? <span class="faint">and {hosts.length - most} more</span> : null}
    </span>
  );
}

/** A list of sentences of evidence. */
export function Lines({ lines, none }: { lines: readonly string[]; none: string }): JSX.Element {
  if (lines.length === 0) {
    return <p class="soft">{none}</p>;
  }
  return (
    <ul class="evidence">
      {lines.map((line) => (
        <li key={line}>{line}</li>
      ))}
    </ul>
  );
}
