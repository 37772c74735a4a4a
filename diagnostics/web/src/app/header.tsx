// What every view shows on top: which job, how it is, how far, whether the page is up to date, and the page's switches.

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
      <span class="connection tone-quiet" title="As the run directory has it: nothing arrives here by itself">
        <ShapeIcon shape="square" /> <span class="connection-text">recorded history</span>
      </span>
    );
  }
  if (connection.value === "live") {
    return (
      <span class="connection tone-good" title="News arrive as they happen">
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
    <span class="connection tone-warning" title="The server does not answer; it is tried again by itself">
      <ShapeIcon shape="triangle" /> reconnecting since {durationText(Math.round(lost))}
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
  const told = job.value;
  if (told === null) {
    return null;
  }
  return (
    <span class="role" title={told.can_act ? "may act on the job" : told.why_not_act}>
      <span class="role-name">{told.role}</span>
      {told.has_session ? <SignOut /> : null}
    </span>
  );
}

function Progress(): JSX.Element | null {
  const told = overview.value;
  const step = shownStep.value;
  if (told === null || step === null) {
    return null;
  }
  return (
    <span class="header-step">
      <span class="faint">step</span> <strong>{countText(step)}</strong>
      {told.train_steps === null ? null : <span class="faint"> of {countText(told.train_steps)}</span>}
      {told.last_step_unix_s === null ? null : (
        <span class="faint header-age">
          {" "}
          <Age at={told.last_step_unix_s} />
        </span>
      )}
    </span>
  );
}

/** Said to those who listen: only when it changes in kind, not with each second that a problem lasts. */
function Announcement(): JSX.Element {
  const told = overview.value;
  const text = told === null ? "" : [told.state, ...told.reasons.map((one) => one.text)].join(". ");
  const said = useRef({ kind: "", text: "" });
  const kind = text.replace(/[\d.,]+/g, "");
  if (kind !== said.current.kind) {
    said.current = { kind, text };
  }
  return (
    <div class="visually-hidden" aria-live="polite" data-live="health">
      {said.current.text}
    </div>
  );
}

/** Why the job is not healthy, in a line on every view: the first reason, and the way to the others. Else what it does. */
function Headline(): JSX.Element | null {
  const told = overview.value;
  if (told === null) {
    return null;
  }
  const reason = told.reasons[0];
  const num = told.reasons.length;
  return (
    <span class="headline" title={reason?.text ?? told.headline}>
      {reason === undefined ? (
        <>
          {sentence(told.headline)}
          {told.since_unix_s === null ? null : (
            <span class="faint">
              {" "}
              since <TimeText at={told.since_unix_s} />
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
  const told = overview.value;
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
      {told === null ? null : <HealthBadge told={told} />}
      <Headline />
      <span class="header-right">
        {isPastShown.value && shown !== null ? (
          <button type="button" class="button small past" onClick={() => setParams({ round: null }, { isNewEntry: true })}>
            round {shown.number} is shown; go to the newest
          </button>
        ) : null}
        {missingRound.value === null ? null : (
          <button type="button" class="button small past" onClick={() => setParams({ round: null })}>
            nothing is known of round {missingRound.value}; the newest is shown
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
