// GPUs and network links of a host: current values, history over the last hour or the range, and errors.

import "./devices.css";

import type { JSX } from "preact";

import type { GpuDocument, HostDevicesDocument, LinkDocument, XidDocument } from "../../api/documents";
import { useResource } from "../../api/resource";
import { hrefOf } from "../../app/location";
import { isWholeRun, rangeQuery } from "../../app/range";
import { Badge } from "../../ui/badge";
import { TimeText } from "../../ui/figures";
import { countText, memoryText, NOT_KNOWN, numberText } from "../../ui/format";
import { Section } from "../../ui/section";
import { Table, type Column } from "../../ui/table";
import { Trace } from "./trace";

const SPEED_UNITS = 1000;

/** The least span of each kind of line, in its unit, so that small variations look small. */
const SPANS = { temperature: 20, clock: 200, power: 200, errors: 10 };

function of(value: number | null, most: number | null, unit: string): string {
  if (value === null) {
    return NOT_KNOWN;
  }
  return most === null ? `${numberText(value)} ${unit}` : `${numberText(value)} of ${numberText(most)} ${unit}`;
}

/** "0 / 3": related counts; a dash if all are unknown. */
function counts(...values: (number | null)[]): string {
  return values.every((value) => value === null) ? NOT_KNOWN : values.map((value) => countText(value)).join(" / ");
}

function GpuState({ gpu }: { gpu: GpuDocument }): JSX.Element {
  const broken = gpu.error || (gpu.recovery === "" ? "" : `requires ${gpu.recovery}`) || (gpu.has_remap_failed ? "row remapping failed" : "");
  if (broken !== "") {
    return (
      <Badge tone="bad" shape="octagon" title={gpu.error}>
        {broken}
      </Badge>
    );
  }
  if (gpu.fault !== "" || gpu.is_reset_pending) {
    return (
      <Badge tone="warning" shape="triangle">
        {gpu.fault || "reset pending"}
      </Badge>
    );
  }
  return (
    <Badge tone="good" shape="circle">
      OK
    </Badge>
  );
}

const GPU_COLUMNS: readonly Column<GpuDocument>[] = [
  {
    key: "gpu", label: "GPU", isNumber: true, sort: (row) => row.gpu,
    render: (row) => <span title={row.uuid}>{row.gpu}</span>,
  },
  {
    key: "rank", label: "Rank", isNumber: true, sort: (row) => row.rank,
    render: (row) => (row.rank === null ? NOT_KNOWN : <a href={hrefOf("ranks", { rank: row.rank })}>{row.rank}</a>),
  },
  { key: "state", label: "State", sort: (row) => row.error || row.throttled, render: (row) => <GpuState gpu={row} /> },
  {
    key: "temperature", label: "Temperature", sort: (row) => row.temperature_c,
    title: "Chip temperature; the tooltip shows the memory temperature and the slowdown threshold",
    render: (row) => (
      <Trace
        text={
          <span title={`memory ${numberText(row.memory_temperature_c)} \u00b0C, slowdown at ${numberText(row.slowdown_temperature_c)} \u00b0C`}>
            {of(row.temperature_c, null, "\u00b0C")}
          </span>
        }
        history={row.temperature_history}
        label={`temperature of GPU ${row.gpu}`}
        leastSpan={SPANS.temperature}
      />
    ),
  },
  {
    key: "clock", label: "SM clock", sort: (row) => row.sm_clock_mhz,
    render: (row) => (
      <Trace
        text={<span title={`throttled by: ${row.throttled || "nothing"}`}>{of(row.sm_clock_mhz, row.max_sm_clock_mhz, "MHz")}</span>}
        history={row.clock_history}
        label={`clock of GPU ${row.gpu}`}
        leastSpan={SPANS.clock}
      />
    ),
  },
  {
    key: "power", label: "Power", sort: (row) => row.power_w,
    render: (row) => (
      <Trace
        text={<span title={`of ${numberText(row.power_limit_w)} W`}>{of(row.power_w, null, "W")}</span>}
        history={row.power_history}
        label={`power of GPU ${row.gpu}`}
        leastSpan={SPANS.power}
      />
    ),
  },
  {
    key: "memory", label: "Memory", isNumber: true, sort: (row) => row.memory_used_bytes,
    render: (row) => <span title={`of ${memoryText(row.memory_total_bytes)}`}>{memoryText(row.memory_used_bytes)}</span>,
  },
  {
    key: "use", label: "Utilization", isNumber: true, title: "Share of time in which a kernel was running", sort: (row) => row.utilization,
    render: (row) => (row.utilization === null ? NOT_KNOWN : `${numberText(100 * row.utilization)} %`),
  },
  {
    key: "ecc", label: "Memory errors", isNumber: true, sort: (row) => row.uncorrected_errors,
    title: "Corrected / uncorrected since the driver was loaded; the tooltip shows lifetime counts",
    render: (row) => (
      <span title={`lifetime: ${counts(row.lifetime_corrected_errors, row.lifetime_uncorrected_errors)}`}>
        {counts(row.corrected_errors, row.uncorrected_errors)}
      </span>
    ),
  },
  {
    key: "rows", label: "Remapped rows", isNumber: true, sort: (row) => row.uncorrected_rows,
    title: "Memory rows remapped after corrected / uncorrected errors; the tooltip shows retired pages of older GPUs",
    render: (row) => <span title={`${counts(row.retired_pages)} retired pages`}>{counts(row.corrected_rows, row.uncorrected_rows)}</span>,
  },
  {
    key: "links", label: "NVLink / PCIe", isNumber: true, sort: (row) => row.nvlink_errors,
    title: "NVLink errors / PCIe replays",
    render: (row) => counts(row.nvlink_errors, row.pcie_replays),
  },
];

function speedText(mbps: number | null): string {
  return mbps === null ? NOT_KNOWN : mbps >= SPEED_UNITS ? `${numberText(mbps / SPEED_UNITS)} Gbit/s` : `${numberText(mbps)} Mbit/s`;
}

const LINK_COLUMNS: readonly Column<LinkDocument>[] = [
  { key: "link", label: "Link", sort: (row) => row.link, render: (row) => row.link },
  {
    key: "state", label: "State", sort: (row) => row.state,
    render: (row) => (
      <Badge tone={row.is_up ? "good" : "bad"} shape={row.is_up ? "circle" : "octagon"}>
        {row.state}
      </Badge>
    ),
  },
  { key: "speed", label: "Speed", isNumber: true, sort: (row) => row.speed_mbps, render: (row) => speedText(row.speed_mbps) },
  { key: "downs", label: "Link failures", isNumber: true, title: "Carrier changes, or lost connections", sort: (row) => row.downs, render: (row) => counts(row.downs) },
  {
    key: "errors", label: "Errors", title: "Receive / transmit / symbol errors since the driver was loaded", sort: (row) => row.rx_errors,
    render: (row) => (
      <Trace
        text={counts(row.rx_errors, row.tx_errors, row.symbol_errors)}
        history={row.error_history}
        label={`errors of ${row.link}`}
        leastSpan={SPANS.errors}
      />
    ),
  },
  {
    key: "dropped", label: "Dropped", isNumber: true, title: "Received / transmitted packets", sort: (row) => row.rx_dropped,
    render: (row) => counts(row.rx_dropped, row.tx_dropped),
  },
  { key: "again", label: "Retransmissions", isNumber: true, title: "Counted by RDMA hardware", sort: (row) => row.retransmissions, render: (row) => counts(row.retransmissions) },
];

const XID_COLUMNS: readonly Column<XidDocument>[] = [
  { key: "at", label: "When", sort: (row) => row.at_unix_s, render: (row) => <TimeText at={row.at_unix_s} /> },
  { key: "xid", label: "Xid", isNumber: true, sort: (row) => row.xid, render: (row) => row.xid },
  { key: "gpu", label: "GPU", isNumber: true, sort: (row) => row.gpu, render: (row) => countText(row.gpu) },
  { key: "step", label: "Step", isNumber: true, sort: (row) => row.step, render: (row) => countText(row.step) },
  {
    key: "kind", label: "Kind", sort: (row) => row.kind,
    render: (row) => (
      <Badge tone={row.kind === "hardware" ? "bad" : row.kind === "mended" ? "warning" : "quiet"} shape={row.kind === "hardware" ? "octagon" : "triangle"}>
        {row.kind}
      </Badge>
    ),
  },
  { key: "meaning", label: "Meaning", render: (row) => row.meaning },
  { key: "advice", label: "Advice", className: "wide", render: (row) => row.advice },
];

/** The time at which the values were read, and the period of the lines. */
function Times({ document, at }: { document: HostDevicesDocument; at: number | undefined }): JSX.Element | null {
  return at === undefined ? null : (
    <>
      read at <TimeText at={at} />; lines cover <TimeText at={document.first_unix_s} /> to <TimeText at={document.last_unix_s} />
    </>
  );
}

function Tables({ document }: { document: HostDevicesDocument }): JSX.Element {
  const { host, gpus, links, xids } = document;
  return (
    <>
      <Section title="GPUs" note={<Times document={document} at={gpus[0]?.at_unix_s} />}>
        {gpus.length === 0 ? (
          <p class="soft">No GPU data{isWholeRun.value ? ": the host has no GPU, or no driver that reports values" : " in this range"}.</p>
        ) : (
          <Table caption={`GPUs of ${host}`} columns={GPU_COLUMNS} rows={gpus} rowKey={(row) => String(row.gpu)} sortParam="gpus" />
        )}
      </Section>
      {xids.length === 0 ? null : (
        <Section title="Errors reported by the driver" note={`${xids.length}, the newest first`}>
          <Table caption={`Xid errors of ${host}`} columns={XID_COLUMNS} rows={xids} rowKey={(row) => `${row.at_unix_s} ${row.gpu} ${row.xid}`} sortParam="xids" />
        </Section>
      )}
      <Section title="Network links" note={<Times document={document} at={links[0]?.at_unix_s} />}>
        {links.length === 0 ? (
          <p class="soft">No data of network links{isWholeRun.value ? "" : " in this range"}.</p>
        ) : (
          <Table caption={`Network links of ${host}`} columns={LINK_COLUMNS} rows={links} rowKey={(row) => row.link} sortParam="links" />
        )}
      </Section>
    </>
  );
}

/** GPUs and links of a host, or one line if no data exists. */
export function HostDevices({ host }: { host: string }): JSX.Element | null {
  const { data } = useResource<HostDevicesDocument>(`hosts/${encodeURIComponent(host)}/devices`, rangeQuery(), "hosts");
  if (data === null) {
    return null;
  }
  if (data.last_unix_s === null) {
    return (
      <Section title="GPUs and links">
        <p class="soft">No data of GPUs and links: diagnostics.telemetry_interval_s is 0, or no streamer ran on this host.</p>
      </Section>
    );
  }
  return (
    <>
      {data.problem === "" ? null : (
        <p class="devices-problem">
          <Badge tone="warning" shape="triangle">
            silent
          </Badge>{" "}
          {data.problem}
        </p>
      )}
      <Tables document={data} />
    </>
  );
}
