// Why the job is not healthy, what is red first: each with a way to the view that explains it, and the runbook for it.

import type { JSX } from "preact";

import type { OverviewDocument, ReasonDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { healthOf, type Health } from "../../ui/badge";
import { TimeText } from "../../ui/figures";
import { ranksText } from "../../ui/format";
import { ShapeIcon } from "../../ui/icons";
import { runbookHref } from "../runbooks/steps";

const MOST_HOSTS = 4;

function Places({ reason }: { reason: ReasonDocument }): JSX.Element {
  const hosts = reason.hosts.slice(0, MOST_HOSTS);
  const rank = reason.ranks[0];
  return (
    <span class="reason-links">
      {reason.since_unix_s === null ? null : (
        <span class="faint">
          since <TimeText at={reason.since_unix_s} />
        </span>
      )}
      {hosts.map((host) => (
        <a key={host} href={hrefOf(["hosts", host])}>
          {host}
        </a>
      ))}
      {reason.hosts.length > MOST_HOSTS ? (
        <a href={hrefOf("hosts")}>and {reason.hosts.length - MOST_HOSTS} more hosts</a>
      ) : null}
      {rank === undefined ? null : (
        <>
          <a href={hrefOf("grid", { rank, round: null })}>
            {reason.ranks.length === 1 ? "rank" : "ranks"} {ranksText(reason.ranks, 4)}
          </a>
          <a href={hrefOf("logs", { round: null, ranks: reason.ranks.slice(0, 16).join(",") })}>logs</a>
        </>
      )}
      <a href={runbookHref(reason.runbook, "")} title={`what to do: ${reason.code}`}>
        runbook
      </a>
    </span>
  );
}

function Reason({ reason }: { reason: ReasonDocument }): JSX.Element {
  const isRed = reason.level === "red";
  return (
    <li class={isRed ? "reason tone-bad" : "reason tone-warning"} data-code={reason.code}>
      <span class="reason-kind">
        <ShapeIcon shape={isRed ? "octagon" : "triangle"} />
        <span class="visually-hidden">{reason.level}: </span>
      </span>
      <span class="reason-text">{reason.text}</span>
      <Places reason={reason} />
    </li>
  );
}

const CALM: Partial<Record<Health, string>> = {
  good: "No problem is known.",
  over: "The job is over; what follows is its history.",
};

export function Reasons({ told }: { told: OverviewDocument }): JSX.Element {
  return (
    <section class="reasons" aria-label="Reasons" data-num-reasons={told.reasons.length}>
      {told.reasons.length === 0 ? (
        <p class="calm">{CALM[healthOf(told)] ?? told.headline}</p>
      ) : (
        <ul>
          {told.reasons.map((reason) => (
            <Reason key={`${reason.code} ${reason.text}`} reason={reason} />
          ))}
        </ul>
      )}
      {told.open_incident === "" ? null : (
        <p class="reason-more">
          <a href={hrefOf(["incidents", told.open_incident])}>What the system does about it: incident {told.open_incident}</a>
        </p>
      )}
    </section>
  );
}
