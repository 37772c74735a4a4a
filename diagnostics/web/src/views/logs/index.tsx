// Logs of all ranks: the causes of failures, and a search over all lines.

import type { JSX } from "preact";

import { useResource } from "../../api/resource";
import type { LogLinesDocument, LogCausesDocument } from "../../api/documents";
import { shownRound } from "../../app/job";
import { setParams, useParam } from "../../app/location";
import { isWholeRun, rangeQuery } from "../../app/range";
import { RoundSelect } from "../../app/round_select";
import { connection } from "../../api/live";
import { Switch, TextField } from "../../ui/controls";
import { countOf, countText } from "../../ui/format";
import { Section, ViewHead } from "../../ui/section";
import { EmptyState, Loaded } from "../../ui/states";
import { Causes } from "./causes";
import { LineList } from "./line_list";

const LIMIT = 2000;

function note(document: LogLinesDocument | null): string | undefined {
  if (document === null) {
    return undefined;
  }
  const { num_matching: matching, num_searched: searched, lines } = document;
  const shown = lines.length < matching ? `; the newest ${countText(lines.length)} are shown` : "";
  const partial = document.is_partial ? "; older lines were not searched" : "";
  return `matching: ${countText(matching)} of ${countOf(searched, "line")}${shown}${partial}`;
}

function Search(): JSX.Element {
  const [query, setQuery] = useParam("query", "");
  const [isRegex, setIsRegex] = useParam("is_regex", "");
  const [ranks, setRanks] = useParam("ranks", "");
  const [hosts, setHosts] = useParam("hosts", "");
  const [follow, setFollow] = useParam("follow", "yes");
  const number = shownRound.value?.number ?? null;
  const isFollowing = follow === "yes" && connection.value !== "recorded";
  const asked = { query, is_regex: isRegex === "yes" ? true : null, ranks, hosts, round: number, limit: LIMIT, ...rangeQuery() };
  const found = useResource<LogLinesDocument>("logs", asked, isFollowing ? "logs" : undefined);
  const isNarrowed = query !== "" || ranks !== "" || hosts !== "" || !isWholeRun.value;
  return (
    <Section
      title="Lines"
      note={note(found.data)}
      tools={
        <>
          <TextField label="Search" value={query} onChange={setQuery} isSearch placeholder="text in a line" size={28} />
          <Switch label="regular expression" isOn={isRegex === "yes"} onChange={(isOn) => setIsRegex(isOn ? "yes" : "")} />
          <TextField label="Ranks" value={ranks} onChange={setRanks} placeholder="0:7,16" size={10} />
          <TextField label="Hosts" value={hosts} onChange={setHosts} placeholder="name,name" size={12} />
          {connection.value === "recorded" ? null : (
            <Switch label="follow" isOn={isFollowing} onChange={(isOn) => setFollow(isOn ? "yes" : "no")} />
          )}
        </>
      }
    >
      <Loaded resource={found} lines={16} none="No log lines">
        {(document) =>
          document.lines.length === 0 ? (
            <EmptyState
              title={isNarrowed ? "No matching lines" : "No log lines"}
              action={
                isNarrowed ? (
                  <button
                    type="button"
                    class="button small"
                    onClick={() => setParams({ query: null, is_regex: null, ranks: null, hosts: null, from: null, to: null })}
                  >
                    Show all lines
                  </button>
                ) : undefined
              }
            >
              {isNarrowed
                ? `${countText(document.num_searched)} lines of round ${document.round}${isWholeRun.value ? "" : " in this range"} were searched.`
                : "Workers log lines when they start, warn or fail; the streamer of each host sends these lines."}
            </EmptyState>
          ) : (
            <LineList lines={document.lines} isFollowing={isFollowing} query={isRegex === "yes" ? "" : query} />
          )
        }
      </Loaded>
    </Section>
  );
}

export function LogsView(): JSX.Element {
  const number = shownRound.value?.number ?? null;
  const causes = useResource<LogCausesDocument>("logs/causes", { round: number }, "logs");
  return (
    <>
      <ViewHead title="Logs" note={number === null ? undefined : `round ${number}`}>
        <RoundSelect />
      </ViewHead>
      <Causes resource={causes} />
      <Search />
    </>
  );
}
