// All requests and decisions with user, time, reason and result; a chain of hashes shows whether any entry was modified.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { AuditDocument, AuditEntryDocument } from "../../api/documents";
import { isWholeRun, rangeQuery } from "../../app/range";
import { useParam } from "../../app/location";
import { Badge } from "../../ui/badge";
import { Segmented } from "../../ui/controls";
import { TimeText } from "../../ui/figures";
import { countText } from "../../ui/format";
import { ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";

const COLUMNS: readonly Column<AuditEntryDocument>[] = [
  { key: "at", label: "When", sort: (row) => row.at_unix_s, render: (row) => <TimeText at={row.at_unix_s} /> },
  { key: "actor", label: "By", sort: (row) => row.actor, render: (row) => row.actor },
  { key: "source", label: "Source", sort: (row) => row.source, render: (row) => row.source },
  { key: "action", label: "Action", sort: (row) => row.action, render: (row) => row.action },
  { key: "target", label: "Target", sort: (row) => row.target, render: (row) => row.target },
  { key: "result", label: "Result", sort: (row) => row.result, render: (row) => row.result },
  { key: "reason", label: "Reason", className: "wide", render: (row) => row.reason },
  {
    key: "hash",
    label: "Hash",
    render: (row) => (
      <span class="faint" title={row.entry_hash}>
        {row.entry_hash.slice(0, 10)}
      </span>
    ),
  },
];

const SOURCES = [
  { value: "all", label: "all" },
  { value: "driver", label: "driver" },
  { value: "people", label: "people" },
];

function Entries({ document, source }: { document: AuditDocument; source: string }): JSX.Element {
  const entries = document.entries.filter((entry) => source === "all" || (source === "driver") === (entry.source === "driver"));
  if (entries.length === 0) {
    return (
      <EmptyState title="No entries">
        The audit records each decision of the driver after a verdict, and each request made on this page, with the reason.
        {source === "all" && isWholeRun.value ? "" : " The filters above may hide entries."}
      </EmptyState>
    );
  }
  return (
    <Table
      caption="Audit"
      columns={COLUMNS}
      rows={entries}
      rowKey={(row) => `${row.at_unix_s} ${row.source} ${row.action} ${row.target} ${row.entry_hash}`}
    />
  );
}

function numText(document: AuditDocument | null): string | undefined {
  return document === null ? undefined : `${countText(document.entries.length)} recorded`;
}

export function AuditView(): JSX.Element {
  const [source, setSource] = useParam("source", "all");
  const found = useResource<AuditDocument>("audit", rangeQuery(), "incidents");
  const problem = found.data?.chain_problem;
  return (
    <>
      <ViewHead title="Audit" note={numText(found.data)}>
        {problem === undefined ? null : problem === "" ? (
          <Badge tone="good" shape="circle">
            hash chain intact
          </Badge>
        ) : (
          <Badge tone="bad" shape="octagon">
            {problem}
          </Badge>
        )}
        <Segmented label="Source" options={SOURCES} value={source} onChange={setSource} />
      </ViewHead>
      <Loaded resource={found}>{(document) => <Entries document={document} source={source} />}</Loaded>
    </>
  );
}
