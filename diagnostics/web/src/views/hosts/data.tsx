// The data of a host, in the newest steps or in the range: how long its ranks waited for batches, what its data loader did,
// the producers of pictures that it asked, and replaced samples.

import type { JSX } from "preact";

import type {
  DataCacheDocument, DataLoaderDocument, HostDataDocument, PicturesDocument, ProducerDocument, RankDataDocument, ReplacedSampleDocument,
} from "../../api/documents";
import { useResource } from "../../api/resource";
import { hrefOf } from "../../app/location";
import { rangeQuery } from "../../app/range";
import { Badge, type Tone } from "../../ui/badge";
import { Duration, Figure, TimeText } from "../../ui/figures";
import { bytesText, countOf, countText, durationText, NOT_KNOWN, numberText, percentText } from "../../ui/format";
import type { Shape } from "../../ui/icons";
import { Section } from "../../ui/section";
import { Table, type Column } from "../../ui/table";
import { Trace } from "./trace";

/** The least span of the lines, so that small variations look small. */
const SPANS = { waitS: 0.01, ready: 2, pictures: 2 };

function columnsOf(stepS: number | null): readonly Column<RankDataDocument>[] {
  const share = (row: RankDataDocument): number | null =>
    row.wait_s === null || stepS === null ? null : row.wait_s / (row.wait_s + stepS);
  return [
    {
      key: "rank", label: "Rank", isNumber: true, sort: (row) => row.rank,
      render: (row) => <a href={hrefOf("ranks", { rank: row.rank })}>{row.rank}</a>,
    },
    {
      key: "wait", label: "Wait a step", title: "Mean time that the rank waited for its batch", sort: (row) => row.wait_s,
      render: (row) => (
        <Trace
          text={<Duration seconds={row.wait_s} />}
          history={row.wait_history}
          label={`data waits of rank ${row.rank}`}
          leastSpan={SPANS.waitS}
        />
      ),
    },
    { key: "share", label: "Share of the time", isNumber: true, sort: share, render: (row) => percentText(share(row)) },
    {
      key: "longest", label: "Longest wait", isNumber: true, sort: (row) => row.longest_wait_s,
      render: (row) => (
        <span title={row.longest_wait_step === null ? undefined : `in step ${countText(row.longest_wait_step)}`}>
          {durationText(row.longest_wait_s)}
        </span>
      ),
    },
    {
      key: "late", label: "Steps not ready", isNumber: true, title: "Steps that the data loader did not have ready when the rank requested them",
      sort: (row) => row.num_not_ready,
      render: (row) => countText(row.num_not_ready),
    },
  ];
}

function LoaderFigures({ loader }: { loader: DataLoaderDocument }): JSX.Element {
  const restarts = loader.num_starts === null ? null : loader.num_starts - 1;
  const most = loader.most_ready === null ? "" : ` of ${countText(loader.most_ready)}`;
  return (
    <dl class="figures">
      <Figure
        label="Loader reads"
        value={loader.replicas.length === 0 ? NOT_KNOWN : countOf(loader.replicas.length, "replica")}
        note={loader.num_bytes === null ? undefined : `${bytesText(loader.num_bytes)} a step`}
        title={loader.replicas.length === 0 ? undefined : `replicas ${loader.replicas.join(", ")}`}
      />
      <Figure
        label="Read time"
        value={<Duration seconds={loader.read_s} />}
        note={`a step, at most ${durationText(loader.longest_read_s)}`}
        title="Time of the loader's reads, beside training"
      />
      <Figure
        label="Steps ready"
        value={
          <Trace
            text={`${countText(loader.num_ready)}${most}`}
            history={loader.ready_history}
            label="steps ready"
            leastSpan={SPANS.ready}
          />
        }
        note={`at least ${countText(loader.least_ready)}`}
        title="Steps that the ring had when the ranks requested one; with 0 a rank had to wait"
        tone={loader.least_ready === 0 ? "warning" : undefined}
      />
      <Figure label="Restarts" value={countText(restarts)} note="in this round" tone={(restarts ?? 0) > 0 ? "warning" : undefined} />
    </dl>
  );
}

const STATES: Record<ProducerDocument["state"], { text: string; tone: Tone; shape: Shape }> = {
  "answers": { text: "answers", tone: "good", shape: "circle" },
  "failed": { text: "does not answer", tone: "warning", shape: "triangle" },
  "not-asked": { text: "not asked", tone: "quiet", shape: "ring" },
};

function ProducerState({ state }: { state: ProducerDocument["state"] }): JSX.Element {
  const { text, tone, shape } = STATES[state];
  return (
    <Badge tone={tone} shape={shape}>
      {text}
    </Badge>
  );
}

const PRODUCER_COLUMNS: readonly Column<ProducerDocument>[] = [
  { key: "number", label: "Producer", isNumber: true, sort: (row) => row.number, render: (row) => row.number },
  { key: "address", label: "Address", sort: (row) => row.address, render: (row) => row.address || "on this host" },
  {
    key: "state", label: "State", title: "In the newest step whose reads asked for pictures", sort: (row) => row.state,
    render: (row) => <ProducerState state={row.state} />,
  },
  {
    key: "rate", label: "Pictures/s", title: "Pictures that it answered for this host", sort: (row) => row.pictures_per_s,
    render: (row) => (
      <Trace
        text={numberText(row.pictures_per_s)}
        history={row.pictures_history}
        label={`pictures of producer ${row.number}`}
        leastSpan={SPANS.pictures}
      />
    ),
  },
  {
    key: "answer", label: "Time of a request", isNumber: true, title: "Mean time from connecting to the last of at most 16 pictures",
    sort: (row) => row.answer_s,
    render: (row) => durationText(row.answer_s),
  },
  {
    key: "waiting", label: "Queue", isNumber: true, title: "The most requests, of all hosts, that waited in the producer",
    sort: (row) => row.num_waiting,
    render: (row) => countText(row.num_waiting),
  },
  {
    key: "failed", label: "Failed requests", isNumber: true, title: "They were sent again, to any producer", sort: (row) => row.num_failed,
    render: (row) => countText(row.num_failed),
  },
];

function Producers({ host, pictures }: { host: string; pictures: PicturesDocument }): JSX.Element {
  return (
    <>
      <dl class="figures">
        <Figure
          label="Wait for pictures"
          value={<Duration seconds={pictures.wait_s} />}
          note={`a step, at most ${durationText(pictures.longest_wait_s)}`}
          title="Time in which reads waited for producers of pictures, beside training"
        />
      </dl>
      <Table
        caption={`Producers of pictures that ${host} asks`}
        columns={PRODUCER_COLUMNS}
        rows={pictures.producers}
        rowKey={(row) => String(row.number)}
        sortParam="producers"
      />
    </>
  );
}

const REPLACED_COLUMNS: readonly Column<ReplacedSampleDocument>[] = [
  { key: "at", label: "When", render: (row) => <TimeText at={row.at_unix_s} /> },
  { key: "rank", label: "Rank", isNumber: true, render: (row) => <a href={hrefOf("ranks", { rank: row.rank })}>{row.rank}</a> },
  { key: "text", label: "Replaced sample", className: "wide", render: (row) => row.text },
];

function CacheFigures({ cache }: { cache: DataCacheDocument }): JSX.Element {
  return (
    <dl class="figures">
      <Figure
        label="From the cache"
        value={bytesText(cache.hit_bytes)}
        note={`a step, ${bytesText(cache.fetched_bytes)} from the storage`}
        title="Data in object storage, read through the cache of the host"
      />
      <Figure label="Removed from the cache" value={bytesText(cache.evicted_bytes)} note="a step, to make room" />
      <Figure
        label="Not stored"
        value={countText(cache.num_not_stored)}
        note="blocks, in this round"
        title="Blocks and files that could not be written to the cache: the disk is full"
        tone={cache.num_not_stored > 0 ? "warning" : undefined}
      />
    </dl>
  );
}

/** Waits for data, the data loader, the cache and the producers of a host; nothing where no step is stored. */
export function HostData({ host }: { host: string }): JSX.Element | null {
  const { data } = useResource<HostDataDocument>(`hosts/${encodeURIComponent(host)}/data`, rangeQuery(), "hosts");
  if (data === null || data.last_step === null) {
    return null;
  }
  return (
    <Section title="Data" note={`steps ${countText(data.first_step)} to ${countText(data.last_step)}`}>
      {data.loader === null ? (
        <p class="soft">Each rank reads its own samples: no data loader of this host reported.</p>
      ) : (
        <LoaderFigures loader={data.loader} />
      )}
      {data.cache === null ? null : <CacheFigures cache={data.cache} />}
      <Table
        caption={`Waits for data on ${data.host}`}
        columns={columnsOf(data.step_s)}
        rows={data.ranks}
        rowKey={(row) => String(row.rank)}
        sortParam="data"
      />
      {data.pictures === null ? null : <Producers host={data.host} pictures={data.pictures} />}
      {data.replaced_samples.length === 0 ? null : (
        <Table
          caption={`Replaced samples on ${data.host}`}
          columns={REPLACED_COLUMNS}
          rows={data.replaced_samples}
          rowKey={(row) => `${row.at_unix_s} ${row.rank} ${row.text}`}
        />
      )}
    </Section>
  );
}
