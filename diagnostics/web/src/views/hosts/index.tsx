// The list of hosts, or the page of one host.

import type { JSX } from "preact";

import { useRoute } from "../../app/location";
import { HostDetail } from "./host_detail";
import { HostList } from "./host_list";

export function HostsView(): JSX.Element {
  const [host] = useRoute().rest;
  return host === undefined ? <HostList /> : <HostDetail host={host} />;
}
