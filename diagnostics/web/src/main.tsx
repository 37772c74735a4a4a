// The entry point of the page.

import { render } from "preact";

import "uplot/dist/uPlot.min.css";
import "./ui/tokens.css";
import "./ui/base.css";
import "./ui/layout.css";
import "./ui/controls.css";
import "./ui/components.css";
import "./ui/pictures.css";
import "./ui/views.css";

import { startLive } from "./api/live";
import { startJob } from "./app/job";
import { JobsShell } from "./app/jobs_shell";
import { startKeyboard } from "./app/keyboard";
import { isList } from "./app/place";
import { Shell } from "./app/shell";

const root = document.getElementById("root");
startKeyboard();
if (root !== null && isList) {
  startLive(false);
  render(<JobsShell />, root);
} else if (root !== null) {
  startJob();
  render(<Shell />, root);
}
