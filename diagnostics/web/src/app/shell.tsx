// The page: header, views at the left, the chosen view. A view that fails says so; the others go on.

import { Component, type ComponentChildren, type JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { isSignedOut } from "../api/client";
import { connection } from "../api/live";
import { EmptyState, ErrorState, Skeleton } from "../ui/states";
import { LoginView } from "../views/login";
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
      <EmptyState title="This view has failed" action={<button onClick={() => window.location.reload()}>Load the page anew</button>}>
        A mistake of the page, not of the job: {this.state.text}
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
      <EmptyState title="There is no such view" action={<a href={hrefOf("overview")}>Go to the overview</a>}>
        The address names "{name}", which this version of the dashboard does not have.
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
  const told = overview.value;
  const label = viewNamed(useRoute().view)?.label ?? "megatrain";
  const sign = told?.level === "red" ? "(!) " : told?.level === "amber" ? "(?) " : "";
  const title = `${sign}${job.value?.job ?? "megatrain"} \u2013 ${label}`;
  useEffect(() => {
    document.title = title;
  }, [title]);
}

/** Whoever changes the view by key or link begins to read at its top. */
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
    return <LoginView />;
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
        Skip to the view
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
