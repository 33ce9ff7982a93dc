// Package backend is the contract between the edge and the kinds of machine:
// a Backend makes machines and ends them, an Instance is one machine. What is
// done inside a machine is not here: Instance.Dial reaches the agent, and
// agentclient does the rest, the same for every backend. Package backendtest
// has the suite that every backend passes.
package backend

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// AgentPort is the TCP port of the agent inside each sandbox; it is the port
// of E2B's envd.
const AgentPort = 49983

// AgentDir is where the agent's binary ("agent") is inside each sandbox. It is
// a read-only mount of its own, so an image needs no agent and an upgrade of
// the agent no new image.
const AgentDir = "/.opendsec"

// A Backend makes machines of one kind. Its methods may be called side by side.
type Backend interface {
	// Name returns the kind of machine.
	Name() sandbox.Backend
	// Probe runs a machine and says what the backend can do here. A nil error
	// means it works; the error says, in words for an admin, why not.
	Probe(ctx context.Context) (Features, error)
	// Create makes a machine and starts its agent as process 1. It returns when
	// the machine runs, which may be before the agent listens. On an error
	// nothing is left behind.
	Create(ctx context.Context, cfg Config) (Instance, error)
	// Recover finds a machine again after a restart of the edge. One that was
	// paused is paused still; one that was paused for a snapshot that the
	// restart cut off goes on. ErrGone means that it does not run any more; what
	// is left of it has been removed.
	Recover(ctx context.Context, h Handle) (Instance, error)
	// Close ends what the backend holds ready, such as pools, and waits for
	// it. Machines go on.
	Close() error
}

// A Slotter is a Backend that takes the network slots of its machines itself,
// so that a machine it makes ahead has its own from the beginning. Its Create
// is called with a Slot that is unset. The slot of a machine is the caller's
// from Create on: it releases it after Destroy. Create that fails leaves none.
type Slotter interface {
	// SlotOf returns the slot of a machine that this backend made or found again.
	SlotOf(i Instance) Slot
}

// An Instance is one machine.
type Instance interface {
	// Handle returns what Recover needs, to be kept in the edge's journal.
	Handle() Handle
	// Dial connects to a TCP port of the machine, from inside its network slot.
	Dial(ctx context.Context, port int) (net.Conn, error)
	// Wait returns when the machine has ended by itself or by Destroy.
	Wait(ctx context.Context) (Exit, error)
	// Usage measures the machine from outside.
	Usage(ctx context.Context) (Usage, error)
	// Destroy ends the machine and removes all it had. It may be repeated, and
	// works on a machine in any condition.
	Destroy(ctx context.Context) error
}

// ErrGone says that a machine does not exist any more.
var ErrGone = errors.New("the machine does not run any more")

// Config says what machine to make.
type Config struct {
	ID       sandbox.ID
	Hostname string
	Limits   sandbox.Limits
	Rootfs   Rootfs // the image
	Agent    Agent  // the agent's binary
	Slot     Slot   // its network; unset for a Slotter
	// From is the state that the machine begins with, nil for a fresh one. Its
	// backend, limits, image and agent are those of this Config. With memory,
	// the agent has the identity and token of the machine that it was taken of.
	From *Snapshot
	// Again says that more machines of From are likely to be wanted: it is an
	// image's, not one machine's own.
	Again bool
	// StateDir is a directory of the sandbox's own on the state file system; it
	// exists and is empty. The backend puts its files there and nowhere else.
	StateDir string
}

// Rootfs is an image's file tree on this node.
type Rootfs struct {
	Digest string // of the image, "sha256:…"
	EROFS  string // path of a read-only EROFS file made with "-E noinline_data"
	Tree   string // path of a directory where the kernel has it mounted, read-only
}

// Agent is the agent's binary on this node, in the two forms that backends
// mount at AgentDir.
type Agent struct {
	ID    string // names its content: "agent-" and 16 hexadecimal digits
	EROFS string // an EROFS file that holds "agent"
	Dir   string // a directory that holds "agent"
}

// Slot is a sandbox's network: a network namespace on the host with one end
// of a veth pair (the gateway), and the other end for the machine. Addresses
// inside are the same in every slot.
type Slot struct {
	Name       string `json:"name"`        // unique on the node
	NetNS      string `json:"netns"`       // path of the slot's network namespace
	GuestLink  string `json:"guest_link"`  // the machine's end, inside NetNS, up and without an address
	GuestMAC   string `json:"guest_mac"`   // its hardware address
	GuestAddr  string `json:"guest_addr"`  // address for the machine, with prefix length
	GatewayIP  string `json:"gateway_ip"`  // address of the host's end
	GatewayMAC string `json:"gateway_mac"` // its hardware address
	MTU        int    `json:"mtu"`
	// Of IPv6; "" in a slot of an earlier version, which has none.
	GuestAddr6 string `json:"guest_addr6,omitempty"`
	GatewayIP6 string `json:"gateway_ip6,omitempty"`
}

// Handle is what a backend needs to find one of its machines again. Only the
// backend that made it can read Data.
type Handle struct {
	Backend sandbox.Backend `json:"backend"`
	Data    json.RawMessage `json:"data"`
}

// Exit says how a machine ended.
type Exit struct {
	OutOfMemory bool   // the kernel ended it for its memory limit
	Inside      bool   // code inside killed process 1, where a backend lets it
	Detail      string // a sentence for a person, "" when there is nothing to say
}

// Usage is what a machine uses, measured from outside.
type Usage struct {
	CPU         time.Duration // CPU time since its start
	MemoryBytes int64         // with all that the machine needs around it, and without what it only maps of others
	// SharedMemoryBytes is memory that the machine maps and has in common with
	// others that were made of the same state. It is not in MemoryBytes.
	SharedMemoryBytes int64
	DiskBytes         int64 // of its writable layer
	PIDs              int64 // host processes or threads
}

// Features says what a backend can do on this node.
type Features struct {
	Pause          bool // its instances are Pausers
	SnapshotMemory bool // its instances are Snapshotters with memory, and it is a Restorer
	SnapshotFiles  bool // its instances are Snapshotters of files, and Differs
}
