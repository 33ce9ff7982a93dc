package netgate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

// queue is the kernel's queue of the packets that begin a flow, of one network
// namespace. Whoever holds it decides on each; when nobody does, the kernel
// drops them. It also tells of changes to the namespace's nftables rules.
type queue struct {
	conn    *netlink.Conn
	program string // what the kernel calls this process
}

// Messages and attributes of nfnetlink_queue.
const (
	queuePacket  = unix.NFNL_SUBSYS_QUEUE << 8
	queueVerdict = unix.NFNL_SUBSYS_QUEUE<<8 | 1
	queueConfig  = unix.NFNL_SUBSYS_QUEUE<<8 | 2

	attrPacketHeader  = 1
	attrVerdictHeader = 2
	attrMark          = 3
	attrPayload       = 10

	attrConfigCommand = 1
	attrConfigParams  = 2
	attrConfigLength  = 3

	commandBind = 1
	copyPacket  = 2

	groupRules   = 7 // NFNLGRP_NFTABLES
	rulesChanged = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	attrProgram  = 3 // NFTA_GEN_PROC_NAME

	verdictDrop   = 0
	verdictAccept = 1
)

// headers is how much of a packet is looked at: the longest header of IP and of
// TCP without options.
const headers = 64

// openQueue takes the queue of the network namespace ns.
func openQueue(ns *os.File, length uint32) (*queue, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: int(ns.Fd())})
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		conn.Close()
		return nil, err
	}
	q := &queue{conn, strings.TrimSpace(string(comm))}
	params := binary.BigEndian.AppendUint32(nil, headers)
	params = append(params, copyPacket)
	for _, attr := range []netlink.Attribute{
		{Type: attrConfigCommand, Data: []byte{commandBind, 0, 0, 0}},
		{Type: attrConfigParams, Data: params},
		{Type: attrConfigLength, Data: binary.BigEndian.AppendUint32(nil, length)},
	} {
		if err := q.send(queueConfig, netlink.Acknowledge, attr); err != nil {
			conn.Close()
			return nil, fmt.Errorf("take the queue of packets (the kernel needs nfnetlink_queue): %w", err)
		}
		if _, err := conn.Receive(); err != nil {
			conn.Close()
			return nil, fmt.Errorf("take the queue of packets (the kernel needs nfnetlink_queue): %w", err)
		}
	}
	if err := conn.JoinGroup(groupRules); err != nil {
		conn.Close()
		return nil, fmt.Errorf("listen for changes of nftables: %w", err)
	}
	// What does not fit is dropped, and the sender sends it again.
	if err := conn.SetOption(netlink.NoENOBUFS, true); err != nil {
		conn.Close()
		return nil, fmt.Errorf("set up netlink: %w", err)
	}
	return q, nil
}

func (q *queue) send(kind netlink.HeaderType, flags netlink.HeaderFlags, attrs ...netlink.Attribute) error {
	body, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		return err
	}
	_, err = q.conn.Send(netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | flags},
		Data:   append([]byte{unix.AF_UNSPEC, 0, 0, 0}, body...), // the queue's number is 0
	})
	return err
}

// opening is the first packet of a flow, which waits.
type opening struct {
	id    uint32
	proto netpolicy.Proto
	from  netip.AddrPort
	to    netip.AddrPort
}

// receive returns packets that wait, and whether rules of nftables were
// changed meanwhile. After close its error is os.ErrClosed.
func (q *queue) receive() (waiting []opening, changed bool, err error) {
	msgs, err := q.conn.Receive()
	if err != nil {
		var op *netlink.OpError
		if errors.As(err, &op) && errors.Is(op.Err, os.ErrClosed) {
			err = os.ErrClosed
		}
		return nil, false, err
	}
	for _, m := range msgs {
		switch m.Header.Type {
		case queuePacket:
			if o, ok := parseOpening(m.Data); ok {
				waiting = append(waiting, o)
			} else if o.id != 0 {
				q.decide(o.id, verdictDrop, 0)
			}
		case rulesChanged:
			changed = changed || !q.ours(m.Data)
		}
	}
	return waiting, changed, nil
}

// ours reports whether a change of the rules was made by this process.
func (q *queue) ours(data []byte) bool {
	if len(data) < 4 {
		return false
	}
	attrs, err := netlink.NewAttributeDecoder(data[4:])
	if err != nil {
		return false
	}
	for attrs.Next() {
		if attrs.Type() == attrProgram {
			return attrs.String() == q.program
		}
	}
	return false
}

// decide says what becomes of a packet that waits.
func (q *queue) decide(id uint32, verdict uint32, mark uint32) error {
	header := binary.BigEndian.AppendUint32(nil, verdict)
	header = binary.BigEndian.AppendUint32(header, id)
	return q.send(queueVerdict, 0,
		netlink.Attribute{Type: attrVerdictHeader, Data: header},
		netlink.Attribute{Type: attrMark, Data: binary.BigEndian.AppendUint32(nil, mark)})
}

func (q *queue) close() { q.conn.Close() }

// parseOpening reads a message of the queue. The rules let TCP and UDP without
// IP options in only; of anything else it returns the id and false.
func parseOpening(data []byte) (o opening, ok bool) {
	if len(data) < 4 {
		return o, false
	}
	attrs, err := netlink.NewAttributeDecoder(data[4:])
	if err != nil {
		return o, false
	}
	var packet []byte
	for attrs.Next() {
		switch attrs.Type() {
		case attrPacketHeader:
			if b := attrs.Bytes(); len(b) >= 4 {
				o.id = binary.BigEndian.Uint32(b)
			}
		case attrPayload:
			packet = attrs.Bytes()
		}
	}
	if attrs.Err() != nil {
		return o, false
	}
	return o, o.parse(packet)
}

func (o *opening) parse(p []byte) bool {
	if len(p) < 1 {
		return false
	}
	var proto byte
	var from, to netip.Addr
	switch {
	case p[0] == 0x45 && len(p) >= 20+4:
		proto = p[9]
		from, _ = netip.AddrFromSlice(p[12:16])
		to, _ = netip.AddrFromSlice(p[16:20])
		p = p[20:]
	case p[0]>>4 == 6 && len(p) >= 40+4:
		proto = p[6]
		from, _ = netip.AddrFromSlice(p[8:24])
		to, _ = netip.AddrFromSlice(p[24:40])
		p = p[40:]
	default:
		return false
	}
	o.from = netip.AddrPortFrom(from, binary.BigEndian.Uint16(p))
	o.to = netip.AddrPortFrom(to, binary.BigEndian.Uint16(p[2:]))
	switch proto {
	case unix.IPPROTO_TCP:
		o.proto = netpolicy.TCP
	case unix.IPPROTO_UDP:
		o.proto = netpolicy.UDP
	default:
		return false
	}
	return true
}
