// The page: header, list of views at the left, the selected view. An error in one view does not affect the others.

import { Component, type ComponentChildren, type JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { isSignedOut } from "../api/client";
import { connection } from "../api/live";
import { EmptyState, ErrorState, Skeleton } from "../ui/states";
import { SessionView } from "../views/session";
import { NoDaemon } from "./banner";
import { Header } from "./header";
import { Help } from "./help";
import { job, jobError, overview } from "./job";
import { hrefOf, useRoute } from "./location";
import { Navigation } from "./navigation";
import { RangeBar } from "./range_bar";
import { viewNamed } from "./views";

class Guard extends Component<{ children: ComponentChildren }, { text: string }> {
  override state = { text: "" };

  static override getDerivedStateFromError(error: unknown): { text: string } {
    return { text: error instanceof Error ? error.message : String(error) };
  }

  override render(): ComponentChildren {
    if (this.state.text === "") {
      return this.props.children;
    }
    return (
      <EmptyState title="This view failed" action={<button onClick={() => window.location.reload()}>Reload the page</button>}>
        This is an error of the page, not of the job: {this.state.text}
      </EmptyState>
    );
  }
}

function Chosen(): JSX.Element {
  const { view: name } = useRoute();
  const view = viewNamed(name);
  if (job.value === null) {
    return jobError.value === null ? <Skeleton lines={12} /> : <ErrorState error={jobError.value} />;
  }
  if (view === undefined) {
    return (
      <EmptyState title="No such view" action={<a href={hrefOf("overview")}>Go to the overview</a>}>
        The URL names the view "{name}", which this version of the dashboard does not have.
      </EmptyState>
    );
  }
  const Shown = view.component;
  return (
    <Guard key={name}>
      <Shown />
    </Guard>
  );
}

function useWindowTitle(): void {
  const status = overview.value;
  const label = viewNamed(useRoute().view)?.label ?? "megatrain";
  const sign = status?.level === "red" ? "(!) " : status?.level === "amber" ? "(?) " : "";
  const title = `${sign}${job.value?.job ?? "megatrain"} \u2013 ${label}`;
  useEffect(() => {
    document.title = title;
  }, [title]);
}

/** After a change of view the focus and the scroll position move to the top of the new view. */
function useFocusOfView(): { ref: (element: HTMLElement | null) => void } {
  const element = useRef<HTMLElement | null>(null);
  const isFirst = useRef(true);
  const { view, rest } = useRoute();
  const place = [view, ...rest].join("/");
  useEffect(() => {
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    element.current?.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }, [place]);
  return {
    ref: (found) => {
      element.current = found;
    },
  };
}

export function Shell(): JSX.Element {
  useWindowTitle();
  const { ref } = useFocusOfView();
  const { view } = useRoute();
  if (isSignedOut.value) {
    return <SessionView />;
  }
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault(); // the hash is the route
          document.getElementById("main")?.focus();
        }}
      >
        Skip to content
      </a>
      <Header />
      <NoDaemon />
      <div class="page">
        <Navigation />
        <main id="main" class={`main view-${view}`} tabIndex={-1} ref={ref} data-view={view} data-connection={connection.value}>
          {job.value === null ? null : <RangeBar />}
          <Chosen />
        </main>
      </div>
      <Help />
    </>
  );
}
