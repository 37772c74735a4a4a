// Causes of a failure found in the logs: the root cause first, then failures that follow from it.

import type { JSX } from "preact";

import type { Resource } from "../../api/resource";
import type { LogCauseDocument, LogCausesDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { Badge } from "../../ui/badge";
import { TimeText } from "../../ui/figures";
import { countOf, sentence } from "../../ui/format";
import { Section } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";

const COLUMNS: readonly Column<LogCauseDocument>[] = [
  {
    key: "role",
    label: "Role",
    render: (row) => (
      <Badge tone={row.role === "follows" ? "quiet" : "bad"} shape={row.role === "root" ? "octagon" : row.role === "cause" ? "diamond" : "ring"}>
        {row.role === "follows" ? "cascade" : row.role}
      </Badge>
    ),
  },
  { key: "rank", label: "Rank", isNumber: true, render: (row) => <a href={hrefOf("ranks", { rank: row.rank })}>{row.rank}</a> },
  { key: "host", label: "Host", render: (row) => <a href={hrefOf(["hosts", row.host])}>{row.host}</a> },
  { key: "at", label: "When", render: (row) => <TimeText at={row.at_unix_s === 0 ? null : row.at_unix_s} /> },
  { key: "label", label: "Label", render: (row) => <span title={`rule ${row.rule}`}>{row.label}</span> },
  { key: "action", label: "Recommended action", render: (row) => row.action.replaceAll("_", " ") },
  { key: "line", label: "Line", className: "clip", render: (row) => <span class="log-text" title={row.line}>{row.line}</span> },
];

export function Causes({ resource }: { resource: Resource<LogCausesDocument> }): JSX.Element {
  const summary = resource.data;
  const note = summary === null ? undefined : `${countOf(summary.num_lines, "line")} of ${countOf(summary.num_ranks, "rank")} read`;
  return (
    <Section title="Root cause" note={note}>
      <Loaded resource={resource} lines={2} none="No failure found in the log">
        {(verdict) =>
          verdict.causes.length === 0 ? (
            <p class="soft">{verdict.reason === "" ? "No failure found in the log." : sentence(verdict.reason)}</p>
          ) : (
            <div class="stack tight">
              <p class="reading">
                <strong>{verdict.root_text === "" ? "No culprit identified" : verdict.root_text}</strong>: {verdict.label}
                {verdict.action === "" ? null : <span class="soft">; recommended action: {verdict.action.replaceAll("_", " ")}</span>}
                {verdict.incident_id === "" ? null : (
                  <>
                    {"; "}
                    <a href={hrefOf(["incidents", verdict.incident_id])}>incident {verdict.incident_id}</a>
                  </>
                )}
              </p>
              {verdict.reason === "" ? null : <p class="soft reading">{sentence(verdict.reason)}</p>}
              <Table
                caption="Causes found in the logs, root cause first"
                columns={COLUMNS}
                rows={verdict.causes}
                rowKey={(row) => `${row.rank} ${row.at_unix_s} ${row.line}`}
                rowClass={(row) => (row.role === "follows" ? "is-faint" : "")}
                virtualFrom={40}
              />
            </div>
          )
        }
      </Loaded>
    </Section>
  );
}
