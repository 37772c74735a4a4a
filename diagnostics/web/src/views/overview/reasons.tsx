// The reasons why the job is not healthy, red ones first, each with links to hosts, ranks and logs, and to its runbook.

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
          <a href={hrefOf("ranks", { rank, round: null })}>
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
  over: "The job has ended. This page shows its history.",
};

export function Reasons({ status }: { status: OverviewDocument }): JSX.Element {
  return (
    <section class="reasons" aria-label="Reasons" data-num-reasons={status.reasons.length}>
      {status.reasons.length === 0 ? (
        <p class="calm">{CALM[healthOf(status)] ?? status.headline}</p>
      ) : (
        <ul>
          {status.reasons.map((reason) => (
            <Reason key={`${reason.code} ${reason.text}`} reason={reason} />
          ))}
        </ul>
      )}
      {status.open_incident === "" ? null : (
        <p class="reason-more">
          <a href={hrefOf(["incidents", status.open_incident])}>Current recovery: incident {status.open_incident}</a>
        </p>
      )}
    </section>
  );
}
