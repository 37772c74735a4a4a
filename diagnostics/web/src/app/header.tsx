// The header of every view: the job, its health and progress, the state of the connection, and the page's settings.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";

import { brokenSince, connection } from "../api/live";
import { signOut } from "./session";
import { HealthBadge } from "../ui/badge";
import { nowS } from "../ui/clocked";
import { Age, TimeText } from "../ui/figures";
import { countText, durationText, sentence } from "../ui/format";
import { ShapeIcon } from "../ui/icons";
import { isPastShown, job, missingRound, overview, shownRound, shownStep } from "./job";
import { hrefOf, setParams } from "./location";
import { listHref } from "./place";
import { clock, shownTheme, theme, type Theme } from "./preferences";

export function ConnectionState(): JSX.Element {
  const since = brokenSince.value;
  if (connection.value === "recorded") {
    return (
      <span class="connection tone-quiet" title="Read from the run directory; not updated live">
        <ShapeIcon shape="square" /> <span class="connection-text">recorded history</span>
      </span>
    );
  }
  if (connection.value === "live") {
    return (
      <span class="connection tone-good" title="Updates arrive live">
        <ShapeIcon shape="circle" /> <span class="connection-text">live</span>
      </span>
    );
  }
  if (since === null) {
    return (
      <span class="connection tone-quiet">
        <ShapeIcon shape="dashes" /> <span class="connection-text">connecting</span>
      </span>
    );
  }
  const lost = Math.max(0, nowS.value - since);
  return (
    <span class="connection tone-warning" title="The server does not answer; the page retries automatically">
      <ShapeIcon shape="triangle" /> disconnected for {durationText(Math.round(lost))}
    </span>
  );
}

const NEXT_THEME: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };

export function Switches(): JSX.Element {
  return (
    <>
      <button
        type="button"
        class="button quiet"
        aria-label={`Times are shown in ${clock.value === "utc" ? "UTC" : "local time"}; switch`}
        onClick={() => {
          clock.value = clock.value === "utc" ? "local" : "utc";
        }}
      >
        {clock.value === "utc" ? "UTC" : "local"}
      </button>
      <button
        type="button"
        class="button quiet"
        aria-label={`Theme is ${theme.value}; switch`}
        title={`theme: ${theme.value}${theme.value === "system" ? ` (${shownTheme.value})` : ""}`}
        onClick={() => {
          theme.value = NEXT_THEME[theme.value];
        }}
      >
        {theme.value === "system" ? "auto" : theme.value}
      </button>
    </>
  );
}

export function SignOut(): JSX.Element {
  return (
    <button type="button" class="button quiet" onClick={() => void signOut()}>
      sign out
    </button>
  );
}

function Role(): JSX.Element | null {
  const info = job.value;
  if (info === null) {
    return null;
  }
  return (
    <span class="role" title={info.can_act ? "may act on this job" : info.why_not_act}>
      <span class="role-name">{info.role}</span>
      {info.has_session ? <SignOut /> : null}
    </span>
  );
}

function Progress(): JSX.Element | null {
  const status = overview.value;
  const step = shownStep.value;
  if (status === null || step === null) {
    return null;
  }
  return (
    <span class="header-step">
      <span class="faint">step</span> <strong>{countText(step)}</strong>
      {status.train_steps === null ? null : <span class="faint"> of {countText(status.train_steps)}</span>}
      {status.last_step_unix_s === null ? null : (
        <span class="faint header-age">
          {" "}
          <Age at={status.last_step_unix_s} />
        </span>
      )}
    </span>
  );
}

/** The text for screen readers. It is announced only when more than its numbers changes, not every second that a problem lasts. */
function Announcement(): JSX.Element {
  const status = overview.value;
  const text = status === null ? "" : [status.state, ...status.reasons.map((one) => one.text)].join(". ");
  const announced = useRef({ kind: "", text: "" });
  const kind = text.replace(/[\d.,]+/g, "");
  if (kind !== announced.current.kind) {
    announced.current = { kind, text };
  }
  return (
    <div class="visually-hidden" aria-live="polite" data-live="health">
      {announced.current.text}
    </div>
  );
}

/** One line on every view: the first reason why the job is not healthy, with a link to all reasons; else the job's state. */
function Headline(): JSX.Element | null {
  const status = overview.value;
  if (status === null) {
    return null;
  }
  const reason = status.reasons[0];
  const num = status.reasons.length;
  return (
    <span class="headline" title={reason?.text ?? status.headline}>
      {reason === undefined ? (
        <>
          {sentence(status.headline)}
          {status.since_unix_s === null ? null : (
            <span class="faint">
              {" "}
              since <TimeText at={status.since_unix_s} />
            </span>
          )}
        </>
      ) : (
        <a href={hrefOf("overview")}>
          {num === 1 ? "" : `${countText(num)} reasons, first: `}
          {num === 1 ? sentence(reason.text) : reason.text}
        </a>
      )}
    </span>
  );
}

export function Header(): JSX.Element {
  const status = overview.value;
  const shown = shownRound.value;
  return (
    <header class="header">
      {listHref === null ? null : (
        <a class="header-jobs" href={listHref}>
          Jobs
        </a>
      )}
      <a class="header-job" href={hrefOf("overview")} title={job.value?.run_directory}>
        {job.value?.job ?? "megatrain"}
      </a>
      {status === null ? null : <HealthBadge status={status} />}
      <Headline />
      <span class="header-right">
        {isPastShown.value && shown !== null ? (
          <button type="button" class="button small past" onClick={() => setParams({ round: null }, { isNewEntry: true })}>
            round {shown.number} is shown; show the newest
          </button>
        ) : null}
        {missingRound.value === null ? null : (
          <button type="button" class="button small past" onClick={() => setParams({ round: null })}>
            no records of round {missingRound.value}; the newest is shown
          </button>
        )}
        <Progress />
        <ConnectionState />
        <Switches />
        <Role />
      </span>
      <Announcement />
    </header>
  );
}
