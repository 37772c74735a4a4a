// The events of an incident in order: fault, decision, recovery and requests of users; also its notifications.

import type { JSX } from "preact";

import type { AuditDocument, AuditEntryDocument, HappenedDocument, IncidentDocument, StoryDocument } from "../../api/documents";
import { clock } from "../../app/preferences";
import { clockText, durationText, fullTimeText } from "../../ui/format";
import { ShapeIcon, type Shape } from "../../ui/icons";

const AFTER_S = 60;

/** Return the requests and decisions during an incident, or about the incident, its verdict or its hosts. */
export function auditOf(incident: IncidentDocument, audit: AuditDocument | null): readonly AuditEntryDocument[] {
  const ends = incident.down_s === null ? Number.POSITIVE_INFINITY : incident.began_unix_s + incident.down_s + AFTER_S;
  const named = new Set([incident.incident_id, incident.verdict_id].filter((name) => name !== ""));
  const hosts = new Set(incident.hosts);
  return (audit?.entries ?? []).filter(
    (entry) =>
      named.has(entry.target) ||
      (entry.at_unix_s >= incident.began_unix_s && (entry.at_unix_s <= ends || hosts.has(entry.target))),
  );
}

export interface StoryEntry {
  at_unix_s: number;
  what: HappenedDocument["what"] | "requested";
  text: string;
}

/** Return all events ordered by time. Decisions of the driver come only from the incident, so that none appears twice. */
export function storyInOrder(story: StoryDocument, audit: readonly AuditEntryDocument[]): readonly StoryEntry[] {
  const requested = audit
    .filter((entry) => entry.source !== "driver")
    .map((entry) => ({
      at_unix_s: entry.at_unix_s,
      what: "requested" as const,
      text: `${entry.actor} requested ${entry.action} ${entry.target}: ${entry.result}${entry.reason === "" ? "" : ` (${entry.reason})`}`,
    }));
  return [...story.happened, ...requested].sort((a, b) => a.at_unix_s - b.at_unix_s);
}

const SHAPES: Record<StoryEntry["what"], { tone: string; shape: Shape }> = {
  "fault": { tone: "bad", shape: "octagon" },
  "noticed": { tone: "warning", shape: "triangle" },
  "verdict": { tone: "warning", shape: "diamond" },
  "decision": { tone: "accent", shape: "square" },
  "step": { tone: "quiet", shape: "ring" },
  "over": { tone: "good", shape: "circle" },
  "notified": { tone: "good", shape: "circle" },
  "not-notified": { tone: "bad", shape: "octagon" },
  "requested": { tone: "accent", shape: "diamond" },
};

/** A list of events, each with its time and the time since the incident began. */
export function InOrder({ list, since }: { list: readonly StoryEntry[]; since: number }): JSX.Element {
  const zone = clock.value;
  return (
    <ol class="in-order">
      {list.map((one) => {
        const sign = SHAPES[one.what];
        const after = one.at_unix_s - since;
        return (
          <li key={`${one.at_unix_s} ${one.text}`} data-what={one.what}>
            <span class={`in-order-shape tone-${sign.tone}`}>
              <ShapeIcon shape={sign.shape} />
            </span>
            <span class="in-order-time">
              <time title={fullTimeText(one.at_unix_s, zone)}>{clockText(one.at_unix_s, zone)}</time>
            </span>
            <span class="in-order-after faint">{Math.abs(after) < 0.0005 ? "" : `${after < 0 ? "" : "+"}${durationText(after)}`}</span>
            <span class="in-order-text">{one.text}</span>
          </li>
        );
      })}
    </ol>
  );
}
