// All actions that a user can request, and the verdicts waiting for a decision.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { HostDocument, HostsDocument, IncidentsDocument, VerdictDocument } from "../../api/documents";
import { job } from "../../app/job";
import { hrefOf } from "../../app/location";
import { Duration, TimeText } from "../../ui/figures";
import { sentence } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { ActionBar } from "./action_bar";
import { hostKinds, WORDINGS, type Kind } from "./wording";

const JOB_KINDS = Object.keys(WORDINGS).filter((kind) => WORDINGS[kind as Kind].target === "none") as Kind[];

const WAITING_COLUMNS: readonly Column<VerdictDocument>[] = [
  {
    key: "verdict",
    label: "Verdict",
    render: (row) => <a href={hrefOf(["incidents", "verdicts", row.verdict_id])}>{row.verdict_id}</a>,
  },
  { key: "cause", label: "Cause", render: (row) => row.cause },
  { key: "hosts", label: "Hosts", render: (row) => row.hosts.join(", ") },
  { key: "gain", label: "Gain", isNumber: true, render: (row) => <Duration seconds={row.gain_s} /> },
  { key: "cost", label: "Cost", isNumber: true, render: (row) => <Duration seconds={row.cost_s} /> },
  { key: "since", label: "Since", isNumber: true, render: (row) => <TimeText at={row.created_unix_s} /> },
  {
    key: "act",
    label: "Decision",
    className: "wide",
    render: (row) => <ActionBar kinds={["approve", "dismiss"]} target={row.verdict_id} isQuiet />,
  },
];

const HOST_COLUMNS: readonly Column<HostDocument>[] = [
  {
    key: "host",
    label: "Host",
    sort: (row) => row.host,
    render: (row) => <a href={hrefOf(["hosts", row.host])}>{row.host}</a>,
  },
  { key: "state", label: "State", sort: (row) => row.state, render: (row) => row.state },
  {
    key: "act",
    label: "Action",
    className: "wide",
    render: (row) => <ActionBar kinds={hostKinds(row)} target={row.host} isQuiet />,
  },
];

function Waiting(): JSX.Element {
  const found = useResource<IncidentsDocument>("incidents", {}, "incidents");
  return (
    <Section title="Waiting for a decision">
      <Loaded resource={found} lines={2}>
        {(document) => {
          const waiting = document.verdicts.filter((verdict) => verdict.outcome === "waiting");
          return waiting.length === 0 ? (
            <p class="soft">No verdict is waiting for a decision.</p>
          ) : (
            <Table caption="Verdicts waiting for a decision" columns={WAITING_COLUMNS} rows={waiting} rowKey={(row) => row.verdict_id} />
          );
        }}
      </Loaded>
    </Section>
  );
}

function Hosts(): JSX.Element {
  const found = useResource<HostsDocument>("hosts", {}, "hosts");
  return (
    <Section title="Hosts">
      <Loaded resource={found}>
        {(document) => (
          <Table caption="Hosts" columns={HOST_COLUMNS} rows={document.hosts} rowKey={(row) => row.host} defaultSort="host" />
        )}
      </Loaded>
    </Section>
  );
}

export function ActionsView(): JSX.Element {
  const info = job.value;
  return (
    <>
      <ViewHead title="Actions">
        <a href={hrefOf("audit")}>previous requests</a>
      </ViewHead>
      {info === null || !info.can_act ? (
        <>
          <EmptyState
            title="No actions available on this page"
            action={
              <>
                Use the command line instead: <code>megatrain job</code>, <code>megatrain host</code> and{" "}
                <code>megatrain diag verdicts</code>.
              </>
            }
          >
            {sentence(info?.why_not_act ?? "the job has not been read yet")}
          </EmptyState>
          <Waiting />
        </>
      ) : (
        <>
          <Section title="The whole job">
            <table>
              <caption class="visually-hidden">Actions on the whole job</caption>
              <tbody>
                {JOB_KINDS.map((kind) => (
                  <tr key={kind}>
                    <td>
                      <ActionBar kinds={[kind]} target="" isQuiet />
                    </td>
                    <td class="wide soft">{WORDINGS[kind].effect}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Section>
          <Waiting />
          <Hosts />
        </>
      )}
    </>
  );
}
