package dnsproxy

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

// What is told to upstreams, and taken from them.
const (
	payload  = 1232 // bytes of a UDP answer that cross any network whole
	received = 4096 // bytes of a UDP answer that are read
	odd      = 3    // answers with the letters' case lost before it is not relied on
)

// question is all that is taken from a query.
type question struct {
	name string // in the normal form, without a dot at the end
	typ  uint16
}

// upstream is a resolver.
type upstream struct {
	addr     netip.AddrPort
	badUntil atomic.Int64 // Unix ns; it comes last until then
	caseLost atomic.Int32 // answers in a row that lost the case of letters
	noEDNS   atomic.Bool  // it does not know EDNS
}

// exchange asks by UDP, and by TCP what does not fit, or what came back in a way
// that somebody else may have sent.
func (u *upstream) exchange(ctx context.Context, q question) (*dns.Msg, error) {
	m, err := u.byUDP(ctx, q)
	if err == nil && u.refusesEDNS(m) {
		m, err = u.byUDP(ctx, q)
	}
	if err == nil && !m.Truncated {
		return m, nil
	}
	if err != nil && !errors.Is(err, errDoubtful) {
		return nil, err
	}
	m, err = u.byTCP(ctx, q)
	if err == nil && u.refusesEDNS(m) {
		m, err = u.byTCP(ctx, q)
	}
	return m, err
}

// errDoubtful is an answer with the right number and the wrong rest.
var errDoubtful = errors.New("the answer does not fit the question")

// refusesEDNS reports whether an answer says that the upstream does not know
// EDNS, for the first time.
func (u *upstream) refusesEDNS(m *dns.Msg) bool {
	return (m.Rcode == dns.RcodeFormatError || m.Rcode == dns.RcodeNotImplemented) && m.IsEdns0() == nil && !u.noEDNS.Swap(true)
}

// query makes the message for a question: a number and a case of letters by
// chance, which an answer must bring back.
func (u *upstream) query(q question, mix bool) *dns.Msg {
	var chance [2 + 32]byte
	rand.Read(chance[:])
	name := []byte(q.name + ".")
	if mix {
		for i, c := range name {
			if 'a' <= c && c <= 'z' && chance[2+i/8]>>(i%8)&1 == 1 {
				name[i] = c - 'a' + 'A'
			}
		}
	}
	m := &dns.Msg{Question: []dns.Question{{Name: string(name), Qtype: q.typ, Qclass: dns.ClassINET}}}
	m.Id = binary.BigEndian.Uint16(chance[:])
	m.RecursionDesired = true
	if !u.noEDNS.Load() {
		m.SetEdns0(payload, false)
	}
	return m
}

// byUDP asks from a port by chance and waits for the answer.
func (u *upstream) byUDP(ctx context.Context, q question) (*dns.Msg, error) {
	ask := u.query(q, u.caseLost.Load() < odd)
	wire, err := ask.Pack()
	if err != nil {
		return nil, fmt.Errorf("make a query for %s: %w", q.name, err)
	}
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(u.addr)) // the kernel chooses the port by chance
	if err != nil {
		return nil, fmt.Errorf("ask resolver %s: %w", u.addr, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := conn.Write(wire); err != nil {
		return nil, fmt.Errorf("ask resolver %s: %w", u.addr, err)
	}
	buf := make([]byte, received)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return nil, fmt.Errorf("wait for resolver %s: %w", u.addr, errors.Join(err, context.Cause(ctx)))
		}
		if n < 12 || binary.BigEndian.Uint16(buf) != ask.Id {
			continue // not the answer, or forged
		}
		m, err := u.check(ask, buf[:n])
		if errors.Is(err, errOther) {
			continue
		}
		return m, err
	}
}

// errOther is a message that is not the answer at all.
var errOther = errors.New("not the answer")

// check reads an answer and compares it with what was asked.
func (u *upstream) check(ask *dns.Msg, wire []byte) (*dns.Msg, error) {
	m := new(dns.Msg)
	if err := m.Unpack(wire); err != nil {
		return nil, fmt.Errorf("resolver %s: %w: %w", u.addr, errDoubtful, err)
	}
	if !m.Response || m.Opcode != dns.OpcodeQuery {
		return nil, errOther
	}
	if len(m.Question) == 0 && m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		return m, nil // some servers fail with the header alone
	}
	if len(m.Question) != 1 {
		return nil, fmt.Errorf("resolver %s: %w: %d questions", u.addr, errDoubtful, len(m.Question))
	}
	got, want := m.Question[0], ask.Question[0]
	if got.Qtype != want.Qtype || got.Qclass != want.Qclass || !strings.EqualFold(got.Name, want.Name) {
		return nil, errOther
	}
	if got.Name != want.Name {
		u.caseLost.Add(1)
		return nil, fmt.Errorf("resolver %s: %w: the case of letters is lost", u.addr, errDoubtful)
	}
	if want.Name != strings.ToLower(want.Name) { // it had to keep something
		u.caseLost.Store(0)
	}
	return m, nil
}

// byTCP asks over a connection of its own.
func (u *upstream) byTCP(ctx context.Context, q question) (*dns.Msg, error) {
	ask := u.query(q, false)
	wire, err := ask.Pack()
	if err != nil {
		return nil, fmt.Errorf("make a query for %s: %w", q.name, err)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", u.addr.String())
	if err != nil {
		return nil, fmt.Errorf("ask resolver %s: %w", u.addr, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if _, err := conn.Write(framed(wire)); err != nil {
		return nil, fmt.Errorf("ask resolver %s over TCP: %w", u.addr, err)
	}
	answer, err := readFrame(conn, 65535)
	if err != nil {
		return nil, fmt.Errorf("wait for resolver %s over TCP: %w", u.addr, errors.Join(err, context.Cause(ctx)))
	}
	m, err := u.check(ask, answer)
	if err == nil && m.Id != ask.Id {
		err = fmt.Errorf("resolver %s over TCP: %w", u.addr, errOther)
	}
	return m, err
}

// framed puts its length before a message, for TCP.
func framed(wire []byte) []byte {
	return append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(wire)), uint16(len(wire))), wire...)
}

// readFrame reads a message of at most so many bytes from a connection.
func readFrame(r io.Reader, most int) ([]byte, error) {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(head[:]))
	if n > most {
		return nil, fmt.Errorf("a message of %d bytes: at most %d", n, most)
	}
	wire := make([]byte, n)
	if _, err := io.ReadFull(r, wire); err != nil {
		return nil, err
	}
	return wire, nil
}
