package netgate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// tableName is the nftables table in each slot's namespace. The number changes
// with its content, so that a slot of an earlier version gets the new one.
const tableName = "opendsec_gate_1"

// gatewayLink is the gateway's end of a slot's pair.
const gatewayLink = "gw0"

// relayPort is where connections are taken, whatever port they are to.
const relayPort = 1

// Marks of what was decided about the first packet of a flow. They exist in the
// slot's namespace only.
const (
	markAllow  = 1
	markRefuse = 2 // by a reset or "port unreachable"
	markUnable = 3 // by "host unreachable"
)

// Furnish makes a gate of a slot: all addresses are local to it, and a packet
// from the guest passes only if the rules here let it. It is to be called on a
// thread in the slot's namespace and may be repeated. Nobody is let through
// before Open.
func (g *Gate) Furnish(slot backend.Slot) error {
	err := g.furnish(slot)
	g.lack.Store(&err)
	return err
}

// Lack returns why the last slot could not be made a gate, nil when it was.
func (g *Gate) Lack() error {
	if err := g.lack.Load(); err != nil {
		return *err
	}
	return nil
}

func (g *Gate) furnish(slot backend.Slot) error {
	if err := allLocal(slot); err != nil {
		return fmt.Errorf("make a gate of network slot %s: %w", slot.Name, err)
	}
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("make a gate of network slot %s: open nftables: %w", slot.Name, err)
	}
	if err := g.install(c, slot); err != nil {
		return fmt.Errorf("make a gate of network slot %s: install its nftables rules (the kernel needs nf_tables with tproxy, socket and queue): %w", slot.Name, err)
	}
	return nil
}

// install puts the rules in place. A kernel without nft_queue may have the older
// way to have a packet wait; which one works is tried once.
func (g *Gate) install(c *nftables.Conn, slot backend.Slot) error {
	older := xt.Unknown(make([]byte, 8)) // queue 0
	target := &expr.Target{Name: "NFQUEUE", Info: &older}
	if g.older.Load() {
		return install(c, slot, g.limits, target)
	}
	err := install(c, slot, g.limits, &expr.Queue{})
	if err != nil && install(c, slot, g.limits, target) == nil {
		g.older.Store(true)
		return nil
	}
	return err
}

// allLocal has the kernel take packets to any address for its own, and lets it
// answer each that is refused.
func allLocal(slot backend.Slot) error {
	for path, value := range map[string]string{
		"/proc/sys/net/ipv6/conf/lo/disable_ipv6": "0", // for the route below
		"/proc/sys/net/ipv4/icmp_ratemask":        "0",
		"/proc/sys/net/ipv6/icmp/ratelimit":       "0",
		"/proc/sys/net/ipv4/tcp_fin_timeout":      "20",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback: %w", err)
	}
	all := []string{"0.0.0.0/0"}
	if slot.GatewayIP6 != "" {
		all = append(all, "::/0")
	}
	for _, dst := range all {
		_, n, err := net.ParseCIDR(dst)
		if err != nil {
			return err
		}
		err = h.RouteReplace(&netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: n, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST, Table: unix.RT_TABLE_MAIN,
		})
		if err != nil && !(dst == "::/0" && errors.Is(err, unix.EAFNOSUPPORT)) {
			return fmt.Errorf("make %s local: %w", dst, err)
		}
	}
	return nil
}

// find returns our table in a namespace, nil for none.
func find(c *nftables.Conn) (*nftables.Table, error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	for _, t := range tables {
		if t.Name == tableName {
			return t, nil
		}
	}
	return nil, nil
}

// installed reports whether a namespace has the rules.
func installed(c *nftables.Conn) (bool, error) {
	t, err := find(c)
	if err != nil || t == nil {
		return false, err
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	return len(chains) >= 3, err
}

// install puts the rules in place of any that are there, in one batch. queue is
// what has a packet wait.
//
//	prerouting, in this order:
//	  what does not come from the guest's end, with the guest's addresses   drop
//	  what has IP options or extension headers, or is neither TCP nor UDP   drop
//	  more packets than allowed                                            drop
//	  TCP of a connection that is known here, but its first packet           accept
//	  TCP to the gateway that begins nothing (the agent's answers)          accept
//	  port 53                                                              accept: the DNS proxy has it
//	  TCP that begins nothing                                              reset
//	  UDP of a flow that is known here                                     accept
//	  more new flows than allowed                                          drop
//	  the rest: the first packet of a flow                                 queue, to be decided on
//	and later
//	  marked as allowed, TCP                                               to the relay
//	input
//	  marked as refused                                                    reject
func install(c *nftables.Conn, slot backend.Slot, l Limits, queue expr.Any) error {
	table := &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
	old, err := find(c)
	if err != nil {
		return err
	}
	if old != nil { // to delete nothing would take the kernel 10 ms too
		c.DelTable(old)
	}
	c.AddTable(table)
	r := &ruleset{conn: c, table: table}
	if err := r.first(slot, l, queue); err != nil {
		return err
	}
	r.second()
	r.input()
	return c.Flush()
}

type ruleset struct {
	conn  *nftables.Conn
	table *nftables.Table
	chain *nftables.Chain
}

func (r *ruleset) base(name string, hook *nftables.ChainHook, priority nftables.ChainPriority, policy nftables.ChainPolicy) {
	r.chain = r.conn.AddChain(&nftables.Chain{
		Name: name, Table: r.table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: &priority, Policy: &policy,
	})
}

// rule adds a rule of matches and what follows.
func (r *ruleset) rule(parts ...[]expr.Any) {
	var all []expr.Any
	for _, p := range parts {
		all = append(all, p...)
	}
	r.conn.AddRule(&nftables.Rule{Table: r.table, Chain: r.chain, Exprs: all})
}

func (r *ruleset) first(slot backend.Slot, l Limits, queue expr.Any) error {
	mac, err := net.ParseMAC(slot.GuestMAC)
	if err != nil {
		return err
	}
	guest, err := netip.ParsePrefix(slot.GuestAddr)
	if err != nil {
		return err
	}
	gateway, err := netip.ParseAddr(slot.GatewayIP)
	if err != nil {
		return err
	}
	r.base("first", nftables.ChainHookPrerouting, -150, nftables.ChainPolicyDrop)
	drop := count("dropped")
	r.count("dropped")
	r.count("limited")
	r.rule(iif(false, gatewayLink), verdict(expr.VerdictDrop)) // also a second look at what gVisor has had
	r.rule(setMark(0))
	r.rule(load(expr.PayloadBaseLLHeader, 6, 6), cmp(expr.CmpOpNeq, mac), drop, verdict(expr.VerdictDrop))
	r.rule(v4, load(expr.PayloadBaseNetworkHeader, 12, 4), cmp(expr.CmpOpNeq, guest.Addr().AsSlice()), drop, verdict(expr.VerdictDrop))
	r.rule(v4, load(expr.PayloadBaseNetworkHeader, 0, 1), cmp(expr.CmpOpNeq, []byte{0x45}), drop, verdict(expr.VerdictDrop))
	if slot.GuestAddr6 != "" {
		guest6, err := netip.ParsePrefix(slot.GuestAddr6)
		if err != nil {
			return err
		}
		r.rule(v6, load(expr.PayloadBaseNetworkHeader, 8, 16), cmp(expr.CmpOpNeq, guest6.Addr().AsSlice()), drop, verdict(expr.VerdictDrop))
		// The header next to the IPv6 header itself, so nothing lies between.
		r.rule(v6, load(expr.PayloadBaseNetworkHeader, 6, 1), cmp(expr.CmpOpNeq, []byte{unix.IPPROTO_TCP}),
			load(expr.PayloadBaseNetworkHeader, 6, 1), cmp(expr.CmpOpNeq, []byte{unix.IPPROTO_UDP}), drop, verdict(expr.VerdictDrop))
	} else {
		r.rule(v6, drop, verdict(expr.VerdictDrop))
	}
	r.rule(notTCP, notUDP, drop, verdict(expr.VerdictDrop))
	r.rule(over(l.Packets, l.Packets/10), count("limited"), verdict(expr.VerdictDrop))

	known := knownSocket()
	going := append(load(expr.PayloadBaseTransportHeader, 13, 1), append(mask(tcpFin|tcpSyn|tcpRst|tcpAck), cmp(expr.CmpOpNeq, []byte{tcpSyn})...)...)
	r.rule(tcp, going, known, verdict(expr.VerdictAccept))
	r.rule(tcp, going, v4, load(expr.PayloadBaseNetworkHeader, 16, 4), cmp(expr.CmpOpEq, gateway.AsSlice()), verdict(expr.VerdictAccept))
	r.rule(tcp, dport(53), verdict(expr.VerdictAccept))
	r.rule(tcp, going, setMark(markRefuse), verdict(expr.VerdictAccept))
	r.rule(udp, dport(53), verdict(expr.VerdictAccept))
	r.rule(udp, known, verdict(expr.VerdictAccept))
	r.rule(over(l.Flows, l.FlowsBurst), count("limited"), verdict(expr.VerdictDrop))
	r.rule([]expr.Any{queue})
	return nil
}

func (r *ruleset) second() {
	r.base("second", nftables.ChainHookPrerouting, -140, nftables.ChainPolicyAccept)
	r.rule(marked(markAllow), tcp, []expr.Any{
		&expr.Immediate{Register: 1, Data: port(relayPort)},
		&expr.TProxy{Family: byte(nftables.TableFamilyUnspecified), TableFamily: byte(nftables.TableFamilyINet), RegPort: 1},
	}, verdict(expr.VerdictAccept))
}

func (r *ruleset) input() {
	r.base("input", nftables.ChainHookInput, 0, nftables.ChainPolicyAccept)
	reject := func(kind uint32, code uint8) []expr.Any { return []expr.Any{&expr.Reject{Type: kind, Code: code}} }
	r.rule(marked(markRefuse), tcp, reject(unix.NFT_REJECT_TCP_RST, 0))
	r.rule(marked(markRefuse), reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH))
	r.rule(marked(markUnable), reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_HOST_UNREACH))
}

// Flags of TCP.
const (
	tcpFin = 1
	tcpSyn = 2
	tcpRst = 4
	tcpAck = 16
)

var (
	v4     = meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, unix.NFPROTO_IPV4)
	v6     = meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, unix.NFPROTO_IPV6)
	tcp    = meta(expr.MetaKeyL4PROTO, expr.CmpOpEq, unix.IPPROTO_TCP)
	udp    = meta(expr.MetaKeyL4PROTO, expr.CmpOpEq, unix.IPPROTO_UDP)
	notTCP = meta(expr.MetaKeyL4PROTO, expr.CmpOpNeq, unix.IPPROTO_TCP)
	notUDP = meta(expr.MetaKeyL4PROTO, expr.CmpOpNeq, unix.IPPROTO_UDP)
)

func meta(key expr.MetaKey, op expr.CmpOp, value byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: []byte{value}}}
}

func iif(is bool, name string) []expr.Any {
	op := expr.CmpOpNeq
	if is {
		op = expr.CmpOpEq
	}
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: padded}}
}

func load(base expr.PayloadBase, offset, length uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: length}}
}

func cmp(op expr.CmpOp, data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: op, Register: 1, Data: data}}
}

func mask(m byte) []expr.Any {
	return []expr.Any{&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{m}, Xor: []byte{0}}}
}

func port(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }

func dport(n uint16) []expr.Any {
	return append(load(expr.PayloadBaseTransportHeader, 2, 2), cmp(expr.CmpOpEq, port(n))...)
}

// knownSocket matches what a socket of a flow that was let through waits for.
func knownSocket() []expr.Any {
	return []expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{1}}}
}

func setMark(m uint32) []expr.Any {
	return []expr.Any{&expr.Immediate{Register: 1, Data: native(m)}, &expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true}}
}

func marked(m uint32) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(m)}}
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// over matches what comes more often than rate in a second.
func over(rate, burst uint64) []expr.Any {
	return []expr.Any{&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: uint32(burst), Over: true}}
}

func verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

func count(name string) []expr.Any {
	return []expr.Any{&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: name}}
}

func (r *ruleset) count(name string) {
	r.conn.AddObj(&nftables.CounterObj{Table: r.table, Name: name})
}
