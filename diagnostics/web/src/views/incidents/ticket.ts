// An incident as one block of Markdown for a ticket: complete in itself, times in UTC, links to the page.

import type { AuditEntryDocument, IncidentDocument, IncidentLineDocument, IncidentLogsDocument, NoteDocument, StoryDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { clockText, countText, durationText, fullTimeText } from "../../ui/format";
import { runbookHref } from "../runbooks/steps";
import { toldInOrder } from "./story";

const MOST_LINES = 20;

export interface TicketParts {
  incident: IncidentDocument;
  story: StoryDocument | null;
  logs: IncidentLogsDocument | null;
  audit: readonly AuditEntryDocument[];
  notes: readonly NoteDocument[];
  job: string;
  run: string;
}

function utc(unixS: number): string {
  return fullTimeText(unixS, "utc");
}

function cost({ down_s: down, steps_lost: lost, last_step: last, resumed_step: resumed }: IncidentDocument): string {
  const parts = [down === null ? "not over" : `${durationText(down)} from failure to the next step`];
  if (lost !== null) {
    parts.push(`${countText(lost)} steps lost (from ${countText(last)} back to ${countText(resumed)})`);
  }
  return parts.join(", ");
}

function whereText({ hosts, ranks, confidence }: IncidentDocument): string {
  const named = [hosts.join(", "), ranks.length === 0 ? "" : `rank ${ranks.slice(0, 16).join(", ")}`].filter((one) => one !== "");
  return named.length === 0 ? "nobody is named" : `${named.join(", ")}${confidence === "" ? "" : ` (${confidence})`}`;
}

/** A part with a heading; nothing where it has no lines. */
function part(title: string, lines: readonly string[]): string {
  return lines.length === 0 ? "" : `**${title}**\n${lines.join("\n")}`;
}

function fenced(lines: readonly IncidentLineDocument[]): readonly string[] {
  if (lines.length === 0) {
    return [];
  }
  const shown = lines.slice(-MOST_LINES).map((one) => `${clockText(one.at_unix_s, "utc")} rank ${one.rank} ${one.line}`);
  // longer than any fence that a line itself holds
  const longest = Math.max(2, ...shown.map((line) => Math.max(0, ...(line.match(/`+/g) ?? []).map((run) => run.length))));
  const fence = "`".repeat(longest + 1);
  return [fence, ...shown, fence];
}

/** Return the text of a ticket. What is not loaded is not in it. */
export function ticketText({ incident, story, logs, audit, notes, job, run }: TicketParts): string {
  const address = (href: string): string => new URL(href, document.baseURI).href;
  const followed = incident.next_round === null ? "" : `, followed by round ${incident.next_round}`;
  const facts = [
    `- job: ${job}, run ${run}`,
    `- round: ${incident.round}${followed}`,
    `- began: ${utc(incident.began_unix_s)}`,
    `- noticed: ${utc(incident.detected_unix_s)}`,
    `- culprit: ${whereText(incident)}`,
    `- done about it: ${incident.action}`,
    `- cost: ${cost(incident)}`,
  ];
  const happened = story === null ? [] : toldInOrder(story, audit).map((one) => `- ${utc(one.at_unix_s)}: ${one.text}`);
  const told = story === null ? [] : story.told.map((one) => `- ${utc(one.at_unix_s)}: ${one.text}`);
  const links = [
    `- incident: ${address(hrefOf(["incidents", incident.incident_id], { round: null }))}`,
    `- ranks: ${address(hrefOf("grid", { round: incident.round, rank: incident.ranks[0] }))}`,
    `- heat map: ${address(hrefOf("heat", { round: incident.round, rank: incident.ranks[0], step: incident.last_step }))}`,
    `- logs: ${address(hrefOf("logs", { round: incident.round }))}`,
    ...(story?.runbooks ?? []).map((name) => `- runbook: ${address(runbookHref(name, incident.incident_id))}`),
  ];
  const cause = logs === null || logs.telling_line === "" ? [] : [`- the logs say ${logs.label}: ${logs.telling_line}`];
  return [
    `**Incident ${incident.incident_id} of ${job}: ${incident.kind_text} (${incident.state})**\n${incident.reason}`,
    facts.join("\n"),
    part("What happened (UTC)", happened),
    part("Notes", notes.map((one) => `- ${one.user}: ${one.text}`)),
    part("Evidence", [...incident.evidence.map((line) => `- ${line}`), ...cause]),
    part(`Log lines of ${logs?.culprit_text ?? ""} (UTC)`, fenced(logs?.culprit_lines ?? [])),
    part("Log lines of the other ranks (UTC)", fenced(logs?.other_lines ?? [])),
    part("Logs", logs === null || logs.problem === "" ? [] : [logs.problem]),
    part("Who was told", told.length === 0 && story !== null ? [story.why_not_told] : told),
    part("Links", links),
  ]
    .filter((one) => one !== "")
    .join("\n\n");
}
