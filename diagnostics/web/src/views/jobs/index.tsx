// The list of all jobs, by default the most severe first. Each row links to the job's page; two to four jobs can be compared.

import "./jobs.css";

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { JobsDocument } from "../../api/documents";
import { setParams, useNumberParam, useParam } from "../../app/location";
import { Segmented, Select, TextField } from "../../ui/controls";
import { countText } from "../../ui/format";
import { ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { JobTable } from "./table";

const PAGE = 50;
const MOST_COMPARED = 4;
const ORDERS = [
  { value: "severity", label: "severity" },
  { value: "newest", label: "newest first" },
  { value: "name", label: "name" },
];

/** The number of jobs of each health level, as filters. */
function Kinds({ list, chosen }: { list: JobsDocument | null; chosen: string }): JSX.Element {
  const counts = list?.counts;
  const all = counts === undefined ? null : counts.red + counts.amber + counts.green + counts.ended;
  const options = [
    { value: "", label: `all ${countText(all)}` },
    { value: "red", label: `red ${countText(counts?.red)}`, title: "Jobs that do not train, or that lose progress" },
    { value: "amber", label: `amber ${countText(counts?.amber)}`, title: "Jobs that need attention today" },
    { value: "green", label: `green ${countText(counts?.green)}`, title: "Jobs without known problems" },
    { value: "ended", label: `ended ${countText(counts?.ended)}`, title: "Jobs that ended; jobs that failed within the last day are red" },
  ];
  return <Segmented label="Filter of jobs" options={options} value={chosen} onChange={(value) => setParams({ severity: value, page: null })} />;
}

function Pages({ list, first }: { list: JobsDocument; first: number }): JSX.Element | null {
  if (list.num_found <= PAGE) {
    return null;
  }
  const go = (page: number): void => {
    setParams({ page: page === 0 ? null : page }, { isNewEntry: true });
    window.scrollTo(0, 0);
  };
  const page = first / PAGE;
  return (
    <nav class="row jobs-pages" aria-label="Pages of the list">
      <button type="button" class="button small" disabled={page === 0} onClick={() => go(page - 1)}>
        Previous
      </button>
      <span class="soft">
        {countText(first + 1)} to {countText(first + list.jobs.length)} of {countText(list.num_found)}
      </span>
      <button type="button" class="button small" disabled={first + PAGE >= list.num_found} onClick={() => go(page + 1)}>
        Next
      </button>
    </nav>
  );
}

function Compare({ picked }: { picked: readonly string[] }): JSX.Element {
  const isEnough = picked.length >= 2;
  return (
    <button
      type="button"
      class={isEnough ? "button primary" : "button"}
      disabled={!isEnough}
      title={isEnough ? picked.join(", ") : `Select two to ${MOST_COMPARED} jobs with the checkboxes at the left`}
      onClick={() => setParams({ compare: picked.join(",") }, { isNewEntry: true })}
    >
      {picked.length === 0 ? "Compare" : `Compare ${picked.length}`}
    </button>
  );
}

function None({ list }: { list: JobsDocument }): JSX.Element {
  const { red, amber, green, ended } = list.counts;
  if (red + amber + green + ended > 0) {
    return (
      <EmptyState
        title="No matching jobs"
        action={
          <button type="button" class="button small" onClick={() => setParams({ severity: null, text: null, page: null })}>
            Show all
          </button>
        }
      >
        No job matches the filters above.
      </EmptyState>
    );
  }
  return (
    <EmptyState title="No jobs yet" action={<code>megatrain launch CONFIG</code>}>
      {list.runs_directory === "" ? "etcd contains no job." : `${list.runs_directory} contains no run directory.`} A job
      appears here a few seconds after its launch.
    </EmptyState>
  );
}

export function JobsView(): JSX.Element {
  const [severity] = useParam("severity", "");
  const [text] = useParam("text", "");
  const [order, setOrder] = useParam("order", "severity");
  const [pick] = useParam("pick", "");
  const [page] = useNumberParam("page");
  const first = Math.max(0, page ?? 0) * PAGE;
  const found = useResource<JobsDocument>("jobs", { severity, text, order, first, count: PAGE }, "jobs");
  const picked = pick === "" ? [] : pick.split(",");
  const choose = (name: string): void => {
    const next = picked.includes(name) ? picked.filter((one) => one !== name) : [...picked, name].slice(-MOST_COMPARED);
    setParams({ pick: next.join(",") });
  };
  return (
    <>
      <ViewHead title="Jobs">
        <Kinds list={found.data} chosen={severity} />
        <TextField
          label="Find"
          value={text}
          onChange={(value) => setParams({ text: value, page: null })}
          isSearch
          placeholder="name, state or reason"
          size={18}
        />
        <Select label="Order" options={ORDERS} value={order} onChange={setOrder} />
        <Compare picked={picked} />
      </ViewHead>
      <Loaded resource={found} lines={12}>
        {(list) => (
          <>
            {list.problems.map((problem) => (
              <p key={problem} class="stale-line">
                {problem}
              </p>
            ))}
            {list.jobs.length === 0 ? (
              <None list={list} />
            ) : (
              <JobTable rows={list.jobs} picked={picked} choose={choose} />
            )}
            <Pages list={list} first={first} />
          </>
        )}
      </Loaded>
    </>
  );
}
