// All jobs, those that need somebody first: each in a row that leads to its page. Two to four are chosen to be compared.

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
  { value: "trouble", label: "trouble first" },
  { value: "newest", label: "newest first" },
  { value: "name", label: "name" },
];

/** How many there are of each kind, and the way to them. */
function Kinds({ told, chosen }: { told: JobsDocument | null; chosen: string }): JSX.Element {
  const counts = told?.counts;
  const all = counts === undefined ? null : counts.red + counts.amber + counts.green + counts.ended;
  const options = [
    { value: "", label: `all ${countText(all)}` },
    { value: "red", label: `red ${countText(counts?.red)}`, title: "They do not train, or lose what they train" },
    { value: "amber", label: `amber ${countText(counts?.amber)}`, title: "They need a look today" },
    { value: "green", label: `green ${countText(counts?.green)}`, title: "No problem is known" },
    { value: "ended", label: `ended ${countText(counts?.ended)}`, title: "Those that failed within a day are red" },
  ];
  return <Segmented label="Which jobs" options={options} value={chosen} onChange={(value) => setParams({ trouble: value, page: null })} />;
}

function Pages({ told, first }: { told: JobsDocument; first: number }): JSX.Element | null {
  if (told.num_found <= PAGE) {
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
        {countText(first + 1)} to {countText(first + told.jobs.length)} of {countText(told.num_found)}
      </span>
      <button type="button" class="button small" disabled={first + PAGE >= told.num_found} onClick={() => go(page + 1)}>
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
      title={isEnough ? picked.join(", ") : `Choose two to ${MOST_COMPARED} jobs by the boxes at the left`}
      onClick={() => setParams({ compare: picked.join(",") }, { isNewEntry: true })}
    >
      {picked.length === 0 ? "Compare" : `Compare ${picked.length}`}
    </button>
  );
}

function None({ told }: { told: JobsDocument }): JSX.Element {
  const { red, amber, green, ended } = told.counts;
  if (red + amber + green + ended > 0) {
    return (
      <EmptyState
        title="No job is like that"
        action={
          <button type="button" class="button small" onClick={() => setParams({ trouble: null, text: null, page: null })}>
            Show all
          </button>
        }
      >
        The choices above leave none.
      </EmptyState>
    );
  }
  return (
    <EmptyState title="No job is there yet" action={<code>megatrain launch CONFIG</code>}>
      {told.runs_directory === "" ? "etcd knows no job." : `No directory in ${told.runs_directory} is one that a run wrote.`} A job
      appears here a few seconds after its launch.
    </EmptyState>
  );
}

export function JobsView(): JSX.Element {
  const [trouble] = useParam("trouble", "");
  const [text] = useParam("text", "");
  const [order, setOrder] = useParam("order", "trouble");
  const [pick] = useParam("pick", "");
  const [page] = useNumberParam("page");
  const first = Math.max(0, page ?? 0) * PAGE;
  const found = useResource<JobsDocument>("jobs", { trouble, text, order, first, count: PAGE }, "jobs");
  const picked = pick === "" ? [] : pick.split(",");
  const choose = (name: string): void => {
    const next = picked.includes(name) ? picked.filter((one) => one !== name) : [...picked, name].slice(-MOST_COMPARED);
    setParams({ pick: next.join(",") });
  };
  return (
    <>
      <ViewHead title="Jobs">
        <Kinds told={found.data} chosen={trouble} />
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
        {(told) => (
          <>
            {told.problems.map((problem) => (
              <p key={problem} class="stale-line">
                {problem}
              </p>
            ))}
            {told.jobs.length === 0 ? (
              <None told={told} />
            ) : (
              <JobTable rows={told.jobs} picked={picked} choose={choose} />
            )}
            <Pages told={told} first={first} />
          </>
        )}
      </Loaded>
    </>
  );
}
