// The list of log lines; only visible ones are in the document. Lines are always rendered as text, never as markup.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import type { LogLineDocument } from "../../api/documents";
import { hrefOf } from "../../app/location";
import { CopyButton } from "../../ui/controls";
import { clockText, daysText, fullTimeText } from "../../ui/format";
import { clock } from "../../app/preferences";
import { usePixels, useWindow } from "../../ui/virtual";

const ROW_REM = 1.625;
const SEVERE = /\b(error|exception|fatal|traceback|killed|panic)\b/i;
const WARNING = /\bwarn(ing)?\b/i;

interface LineListProps {
  lines: readonly LogLineDocument[];
  isFollowing: boolean;
  /** Occurrences are highlighted; empty: none. */
  query: string;
}

/** Return the text with each occurrence of the query highlighted. */
export function marked(text: string, query: string): ComponentChildren {
  if (query === "") {
    return text;
  }
  const parts: ComponentChildren[] = [];
  const lower = text.toLowerCase();
  const lowerQuery = query.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(lowerQuery); at >= 0; at = lower.indexOf(lowerQuery, from)) {
    parts.push(text.slice(from, at), <mark key={at}>{text.slice(at, at + lowerQuery.length)}</mark>);
    from = at + lowerQuery.length;
  }
  parts.push(text.slice(from));
  return parts;
}

function severity(line: string): string {
  return SEVERE.test(line) ? "is-severe" : WARNING.test(line) ? "is-warning" : "";
}

function asText(lines: readonly LogLineDocument[]): string {
  return lines
    .map((line) => `${new Date(line.at_unix_s * 1000).toISOString()} ${line.host} rank ${line.rank}: ${line.line}`)
    .join("\n");
}

interface LineProps {
  line: LogLineDocument;
  query: string;
  isChosen: boolean;
  onChoose: () => void;
}

function Line({ line, query, isChosen, onChoose }: LineProps): JSX.Element {
  return (
    <li class={`log-line ${severity(line.line)} ${isChosen ? "is-chosen" : ""}`.trim()} onClick={onChoose}>
      <span class="log-time" title={fullTimeText(line.at_unix_s, clock.value)}>
        {clockText(line.at_unix_s, clock.value)}
      </span>
      <a class="log-rank" href={hrefOf("ranks", { rank: line.rank })} title={line.host}>
        {line.rank}
      </a>
      <span class="log-host" title={line.host}>
        {line.host}
      </span>
      <span class="log-text">{marked(line.line, query)}</span>
    </li>
  );
}

export function LineList({ lines, isFollowing, query }: LineListProps): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  const rowHeight = usePixels(ROW_REM);
  const seen = useWindow(box, lines.length, rowHeight);
  const [chosen, setChosen] = useState<LogLineDocument | null>(null);

  const move = (by: number): void => {
    const element = box.current;
    const from = chosen === null ? -1 : lines.indexOf(chosen);
    const next = from < 0 ? lines.length - 1 : Math.max(0, Math.min(lines.length - 1, from + by));
    const line = lines[next];
    if (element === null || line === undefined) {
      return;
    }
    setChosen(line);
    const top = next * rowHeight;
    if (top < element.scrollTop) {
      element.scrollTop = top;
    } else if (top + rowHeight > element.scrollTop + element.clientHeight) {
      element.scrollTop = top + rowHeight - element.clientHeight;
    }
  };

  useEffect(() => {
    const element = box.current;
    if (element !== null && isFollowing && isAtEnd.current) {
      element.scrollTop = element.scrollHeight;
    }
  }, [lines, isFollowing]);

  return (
    <>
      <div class="log-line log-head" aria-hidden="true">
        <span>{clock.value === "utc" ? "UTC" : "local time"}</span>
        <span class="log-rank">rank</span>
        <span class="log-host">host</span>
        <span>line, {daysText(lines[0]?.at_unix_s ?? 0, lines.at(-1)?.at_unix_s ?? 0, clock.value)}</span>
      </div>
      <div
        class="log-box"
        ref={box}
        tabIndex={0}
        role="region"
        aria-label="Log lines"
        onKeyDown={(event) => {
          const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
          if (by !== undefined && event.target === event.currentTarget) {
            event.preventDefault();
            move(by);
          }
        }}
        onScroll={(event) => {
          const element = event.currentTarget;
          isAtEnd.current = element.scrollHeight - element.scrollTop - element.clientHeight < 2 * rowHeight;
        }}
      >
        <ol style={{ paddingTop: `${seen.before}px`, paddingBottom: `${seen.after}px` }}>
          {lines.slice(seen.first, seen.last).map((line, index) => (
            <Line
              key={seen.first + index}
              line={line}
              query={query}
              isChosen={line === chosen}
              onChoose={() => setChosen(line === chosen ? null : line)}
            />
          ))}
        </ol>
      </div>
      <div class="log-foot">
        {chosen === null ? (
          <span class="faint">Click a line, or use the arrow keys, to show it in full.</span>
        ) : (
          <pre class="log-text">{chosen.line}</pre>
        )}
        <CopyButton text={() => asText(chosen === null ? lines : [chosen])}>
          {chosen === null ? "Copy all lines" : "Copy the line"}
        </CopyButton>
      </div>
    </>
  );
}
