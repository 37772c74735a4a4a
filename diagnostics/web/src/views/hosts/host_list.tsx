// The table of all hosts, with filters for those that need attention.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";

import { useResource } from "../../api/resource";
import type { HostDocument, HostsDocument } from "../../api/documents";
import { job } from "../../app/job";
import { hrefOf, setParams, useParam } from "../../app/location";
import { Badge } from "../../ui/badge";
import { Segmented, TextField } from "../../ui/controls";
import { Age, Duration, Figure } from "../../ui/figures";
import { countText, durationText, scoreText, thresholdsText } from "../../ui/format";
import { ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Table, type Column } from "../../ui/table";
import { HostState } from "./host_state";

function ranksOf(row: HostDocument): string {
  if (row.first_rank === null || row.num_workers === null) {
    return "\u2013";
  }
  const last = row.first_rank + row.num_workers - 1;
  return last > row.first_rank ? `${row.first_rank}\u2013${last}` : `${row.first_rank}`;
}

const COLUMNS: readonly Column<HostDocument>[] = [
  {
    key: "host",
    label: "Host",
    sort: (row) => row.host,
    render: (row) => (
      <>
        <a href={hrefOf(["hosts", row.host])}>{row.host}</a>
        {row.is_driver ? <span class="faint"> driver</span> : null}
      </>
    ),
  },
  { key: "state", label: "State", sort: (row) => row.state, render: (row) => <HostState host={row} /> },
  { key: "ranks", label: "Ranks", isNumber: true, sort: (row) => row.first_rank, render: ranksOf },
  { key: "step", label: "Step", isNumber: true, sort: (row) => row.step, render: (row) => countText(row.step) },
  {
    key: "last",
    label: "Last step",
    isNumber: true,
    sort: (row) => row.last_step_unix_s,
    render: (row) => <Age at={row.last_step_unix_s} />,
  },
  {
    key: "median",
    label: "Step time",
    isNumber: true,
    sort: (row) => row.median_step_s,
    render: (row) => <Duration seconds={row.median_step_s} />,
  },
  {
    key: "score",
    label: "Straggler score",
    isNumber: true,
    title: "Robust standard deviations of its slowest rank above its peers",
    sort: (row) => row.straggler_score,
    render: (row) => scoreText(row.straggler_score),
  },
  {
    key: "clock",
    label: "Clock",
    isNumber: true,
    title: "Offset of the host's clock from the daemon's",
    sort: (row) => row.clock_offset_s,
    render: (row) => (
      <span title={row.clock_error_s === null ? undefined : `accurate to ${durationText(row.clock_error_s)}`}>
        {durationText(row.clock_offset_s)}
      </span>
    ),
  },
  {
    key: "events",
    label: "Events",
    sort: (row) => (row.is_connected === null ? null : Number(row.is_connected)),
    render: (row) =>
      row.is_connected === null ? (
        <span class="faint">{"\u2013"}</span>
      ) : row.is_connected ? (
        "received"
      ) : (
        <Badge tone="warning" shape="triangle">
          none
        </Badge>
      ),
  },
  { key: "hardware", label: "Hardware", sort: (row) => row.hardware, render: (row) => row.hardware },
  {
    key: "remark",
    label: "Remark",
    className: "clip",
    render: (row) => (row.remark === "" ? null : <span title={row.remark}>{row.remark}</span>),
  },
];

const OF_RUNNING_JOBS = new Set(["step", "last", "median", "events", "hardware"]);
const RECORDED_COLUMNS = COLUMNS.filter((column) => !OF_RUNNING_JOBS.has(column.key));

/** Return the hosts that match the filters. */
export function chosenHosts(hosts: readonly HostDocument[], show: string, text: string): readonly HostDocument[] {
  return hosts.filter((host) => {
    const isShown =
      show === "all" ||
      (show === "training" && host.first_rank !== null) ||
      (show === "spare" && host.state === "spare") ||
      (show === "problem" && !host.is_in_order) ||
      (show === "cordoned" && host.cordon_unix_s !== null);
    return isShown && (text === "" || host.host.includes(text) || host.remark.includes(text));
  });
}

const SHOWN = [
  { value: "all", label: "all" },
  { value: "training", label: "in the round" },
  { value: "spare", label: "spare" },
  { value: "problem", label: "need attention" },
  { value: "cordoned", label: "cordoned" },
];

function Counts({ hosts }: { hosts: readonly HostDocument[] }): JSX.Element {
  const count = (test: (host: HostDocument) => boolean): string => countText(hosts.filter(test).length);
  return (
    <dl class="figures">
      <Figure label="Hosts" value={countText(hosts.length)} />
      <Figure label="In the round" value={count((host) => host.first_rank !== null)} />
      <Figure label="Spare" value={count((host) => host.state === "spare")} />
      <Figure label="Need attention" value={count((host) => !host.is_in_order)} />
      <Figure label="Cordoned" value={count((host) => host.cordon_unix_s !== null)} />
      <Figure label="No events" value={count((host) => host.is_connected === false)} />
    </dl>
  );
}

function Found({ document, show, text }: { document: HostsDocument; show: string; text: string }): JSX.Element {
  const rows = useMemo(() => chosenHosts(document.hosts, show, text), [document, show, text]);
  if (document.hosts.length === 0) {
    return (
      <EmptyState title="No hosts" action={<code>megatrain launch CONFIG</code>}>
        No executor is registered, and no record of the run names a host. A host appears when its executor has registered it in etcd.
      </EmptyState>
    );
  }
  return (
    <>
      <Counts hosts={document.hosts} />
      {document.thresholds === null ? null : <p class="soft">Straggler score: {thresholdsText(document.thresholds)}.</p>}
      {rows.length === 0 ? (
        <EmptyState
          title="No matching hosts"
          action={
            <button type="button" class="button small" onClick={() => setParams({ show: null, text: null })}>
              Show all {countText(document.hosts.length)}
            </button>
          }
        >
          No host matches the filters above.
        </EmptyState>
      ) : (
        <Table caption="Hosts" columns={job.value?.is_recorded === true ? RECORDED_COLUMNS : COLUMNS} rows={rows} rowKey={(row) => row.host} />
      )}
    </>
  );
}

export function HostList(): JSX.Element {
  const [show, setShow] = useParam("show", "all");
  const [text, setText] = useParam("text", "");
  const found = useResource<HostsDocument>("hosts", {}, "hosts");
  return (
    <>
      <ViewHead title="Hosts">
        <Segmented label="Filter of hosts" options={SHOWN} value={show} onChange={setShow} />
        <TextField label="Find" value={text} onChange={setText} isSearch placeholder="name or remark" size={16} />
      </ViewHead>
      <Loaded resource={found}>{(document) => <Found document={document} show={show} text={text} />}</Loaded>
    </>
  );
}
