// An incident as one self-contained block of Markdown for a ticket, with times in UTC and links to the page.

import type { AuditEntryDocument, IncidentDocument, IncidentLineDocument, IncidentLogsDocument, NoteDocument, StoryDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { clockText, countOf, countText, durationText, fullTimeText } from "../../ui/format";
import { runbookHref } from "../runbooks/steps";
import { storyInOrder } from "./story";

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
  const parts = [down === null ? "not over" : `${durationText(down)} from the failure to the next step`];
  if (lost !== null) {
    parts.push(`${countOf(lost, "step")} lost (from ${countText(last)} back to ${countText(resumed)})`);
  }
  return parts.join(", ");
}

function whereText({ hosts, ranks, confidence }: IncidentDocument): string {
  const named = [hosts.join(", "), ranks.length === 0 ? "" : `rank ${ranks.slice(0, 16).join(", ")}`].filter((one) => one !== "");
  return named.length === 0 ? "none identified" : `${named.join(", ")}${confidence === "" ? "" : ` (${confidence})`}`;
}

/** Return a part with a heading; empty if it has no lines. */
function part(title: string, lines: readonly string[]): string {
  return lines.length === 0 ? "" : `**${title}**\n${lines.join("\n")}`;
}

function fenced(lines: readonly IncidentLineDocument[]): readonly string[] {
  if (lines.length === 0) {
    return [];
  }
  const shown = lines.slice(-MOST_LINES).map((one) => `${clockText(one.at_unix_s, "utc")} rank ${one.rank} ${one.line}`);
  // the fence must be longer than any run of backticks in the lines
  const longest = Math.max(2, ...shown.map((line) => Math.max(0, ...(line.match(/`+/g) ?? []).map((run) => run.length))));
  const fence = "`".repeat(longest + 1);
  return [fence, ...shown, fence];
}

/** Return the text of a ticket. Data that is not loaded is omitted. */
export function ticketText({ incident, story, logs, audit, notes, job, run }: TicketParts): string {
  const address = (href: string): string => new URL(href, document.baseURI).href;
  const followed = incident.next_round === null ? "" : `, followed by round ${incident.next_round}`;
  const facts = [
    `- job: ${job}, run ${run}`,
    `- round: ${incident.round}${followed}`,
    `- began: ${utc(incident.began_unix_s)}`,
    `- detected: ${utc(incident.detected_unix_s)}`,
    `- culprit: ${whereText(incident)}`,
    `- action taken: ${incident.action}`,
    `- cost: ${cost(incident)}`,
  ];
  const happened = story === null ? [] : storyInOrder(story, audit).map((one) => `- ${utc(one.at_unix_s)}: ${one.text}`);
  const notifications = story === null ? [] : story.notifications.map((one) => `- ${utc(one.at_unix_s)}: ${one.text}`);
  const links = [
    `- incident: ${address(hrefOf(["incidents", incident.incident_id], { round: null }))}`,
    `- ranks: ${address(hrefOf("ranks", { round: incident.round, rank: incident.ranks[0] }))}`,
    `- heat map: ${address(hrefOf("heat", { round: incident.round, rank: incident.ranks[0], step: incident.last_step }))}`,
    `- logs: ${address(hrefOf("logs", { round: incident.round }))}`,
    ...(story?.runbooks ?? []).map((name) => `- runbook: ${address(runbookHref(name, incident.incident_id))}`),
  ];
  const cause = logs === null || logs.cause_line === "" ? [] : [`- cause in the logs, ${logs.label}: ${logs.cause_line}`];
  return [
    `**Incident ${incident.incident_id} of ${job}: ${incident.kind_text} (${incident.state})**\n${incident.reason}`,
    facts.join("\n"),
    part("What happened (UTC)", happened),
    part("Notes", notes.map((one) => `- ${one.user}: ${one.text}`)),
    part("Evidence", [...incident.evidence.map((line) => `- ${line}`), ...cause]),
    part(`Log lines of ${logs?.culprit_text ?? ""} (UTC)`, fenced(logs?.culprit_lines ?? [])),
    part(logs?.culprit_text === "" ? "Log lines of all ranks (UTC)" : "Log lines of other ranks (UTC)", fenced(logs?.other_lines ?? [])),
    part("Logs", logs === null || logs.problem === "" ? [] : [logs.problem]),
    part("Notifications", notifications.length === 0 && story !== null ? [story.why_not_notified] : notifications),
    part("Links", links),
  ]
    .filter((one) => one !== "")
    .join("\n\n");
}
