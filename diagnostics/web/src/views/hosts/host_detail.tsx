// One host: its state, the results of its checks, and its history.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { CheckDocument, HostDocument, HostHistoryDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { Badge, type Tone } from "../../ui/badge";
import { Age, Duration, Fact, Facts, Figure, TimeText } from "../../ui/figures";
import { countText, durationText, numberText, scoreText } from "../../ui/format";
import type { Shape } from "../../ui/icons";
import { Section, ViewHead } from "../../ui/section";
import { Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { ActionBar } from "../actions/action_bar";
import { hostKinds } from "../actions/wording";
import { HostData } from "./data";
import { HostDevices } from "./devices";
import { HostState } from "./host_state";

const MOST_ROUNDS = 12;

const OUTCOMES: Record<string, { tone: Tone; shape: Shape }> = {
  passed: { tone: "good", shape: "circle" },
  warning: { tone: "warning", shape: "triangle" },
  failed: { tone: "bad", shape: "octagon" },
  skipped: { tone: "quiet", shape: "dashes" },
};

function Outcome({ outcome }: { outcome: string }): JSX.Element {
  const known = OUTCOMES[outcome] ?? { tone: "quiet" as const, shape: "ring" as const };
  return (
    <Badge tone={known.tone} shape={known.shape}>
      {outcome}
    </Badge>
  );
}

const CHECK_COLUMNS: readonly Column<CheckDocument>[] = [
  { key: "name", label: "Check", sort: (row) => row.name, render: (row) => row.name },
  { key: "outcome", label: "Outcome", sort: (row) => row.outcome, render: (row) => <Outcome outcome={row.outcome} /> },
  {
    key: "value",
    label: "Value",
    isNumber: true,
    sort: (row) => row.value,
    render: (row) => (row.value === null ? "" : `${numberText(row.value)} ${row.unit}`),
  },
  {
    key: "took",
    label: "Duration",
    isNumber: true,
    sort: (row) => row.duration_s,
    render: (row) => <Duration seconds={row.duration_s} />,
  },
  { key: "detail", label: "Detail", className: "wide", render: (row) => row.detail },
];

function HostFigures({ host }: { host: HostDocument }): JSX.Element {
  return (
    <dl class="figures">
      <Figure label="State" value={<HostState host={host} />} note={host.is_driver ? "the driver runs here" : undefined} />
      <Figure label="Step" value={countText(host.step)} note={<Age at={host.last_step_unix_s} />} />
      <Figure label="Step time" value={<Duration seconds={host.median_step_s} />} note="median" />
      <Figure
        label="Ranks"
        value={host.first_rank === null || host.num_workers === null ? "none" : countText(host.num_workers)}
        note={host.first_rank === null ? "not in the round" : `from ${countText(host.first_rank)}`}
      />
      <Figure label="Straggler score" value={scoreText(host.straggler_score)} note="compared with its peers" />
      <Figure
        label="Clock"
        value={<Duration seconds={host.clock_offset_s} />}
        note={host.clock_error_s === null ? "not measured" : `accurate to ${durationText(host.clock_error_s)}`}
      />
    </dl>
  );
}

function About({ host }: { host: HostDocument }): JSX.Element {
  const labels = Object.entries(host.labels);
  return (
    <Section title="About this host">
      <Facts>
        {host.remark === "" ? null : <Fact label="remark">{host.remark}</Fact>}
        {host.cordon_unix_s === null ? null : (
          <Fact label="cordon">
            {host.cordon_reason} <span class="faint">by {host.cordon_by}, </span>
            <TimeText at={host.cordon_unix_s} />
          </Fact>
        )}
        <Fact label="address">{host.address === "" ? "unknown" : host.address}</Fact>
        <Fact label="hardware">{host.hardware === "" ? "unknown" : host.hardware}</Fact>
        <Fact label="joined">
          <TimeText at={host.joined_unix_s} />
        </Fact>
        {host.is_connected === null ? null : <Fact label="events">{host.is_connected ? "received" : "not received"}</Fact>}
        {labels.map(([name, value]) => (
          <Fact key={name} label={name}>
            {value}
          </Fact>
        ))}
      </Facts>
    </Section>
  );
}

function IncidentLinks({ ids, none }: { ids: readonly string[]; none: string }): JSX.Element {
  if (ids.length === 0) {
    return <>{none}</>;
  }
  return (
    <span class="links">
      {ids.map((id) => (
        <a key={id} href={hrefOf(["incidents", id])}>
          {id}
        </a>
      ))}
    </span>
  );
}

function History({ document }: { document: HostHistoryDocument }): JSX.Element {
  return (
    <Section title="History">
      <Facts>
        <Fact label="rounds">
          {document.rounds.length === 0 ? (
            "none"
          ) : (
            <span class="links">
              {document.rounds.slice(-MOST_ROUNDS).map((round) => (
                <a key={round} href={hrefOf("heat", { by: "host", round })}>
                  {round}
                </a>
              ))}
              {document.rounds.length > MOST_ROUNDS ? <span class="faint">newest of {document.rounds.length}</span> : null}
            </span>
          )}
        </Fact>
        <Fact label="culprit in">
          <IncidentLinks ids={document.incident_ids} none="none" />
        </Fact>
        <Fact label="victim in">
          <IncidentLinks ids={document.victim_incident_ids} none="none" />
        </Fact>
      </Facts>
    </Section>
  );
}

function Detail({ document }: { document: HostHistoryDocument }): JSX.Element {
  const { host, checks } = document;
  return (
    <>
      <HostFigures host={host} />
      <div class="columns">
        <About host={host} />
        <History document={document} />
      </div>
      <Section title="Checks" note={checks.length === 0 ? undefined : <TimeText at={document.checks_unix_s} />}>
        {checks.length === 0 ? (
          <p class="soft">No report of its checks is stored.</p>
        ) : (
          <Table caption={`Checks of ${host.host}`} columns={CHECK_COLUMNS} rows={checks} rowKey={(row) => row.name} />
        )}
      </Section>
      <HostData host={host.host} />
      <HostDevices host={host.host} />
    </>
  );
}

export function HostDetail({ host }: { host: string }): JSX.Element {
  const found = useResource<HostHistoryDocument>(`hosts/${encodeURIComponent(host)}`, {}, "hosts");
  const firstRank = found.data?.host.first_rank ?? null;
  return (
    <>
      <p class="crumbs">
        <a href={hrefOf("hosts")}>Hosts</a> / {host}
      </p>
      <ViewHead title={host}>
        {firstRank === null ? null : <a href={hrefOf("ranks", { rank: firstRank, round: null })}>its ranks</a>}
        <a href={hrefOf("logs", { hosts: host })}>its logs</a>
        <a href={hrefOf("heat", { by: "host" })}>heat map</a>
        {found.data === null ? null : <ActionBar kinds={hostKinds(found.data.host)} target={host} />}
      </ViewHead>
      <Loaded resource={found}>{(document) => <Detail document={document} />}</Loaded>
    </>
  );
}
