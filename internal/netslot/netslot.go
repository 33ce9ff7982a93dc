// Package netslot makes the network slots of sandboxes ahead of their use: a
// network namespace with one end of a veth pair as gateway and the other for
// the machine. Inside every slot the addresses are the same, so that a copy of
// a machine keeps its own. A slot has no way out: nothing routes from it.
package netslot
