package main

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
)

// The sandbox's own addresses, and the hardware addresses on its link.
var (
	own     = netip.MustParseAddr("192.0.0.2")
	own6    = netip.MustParseAddr("fd5e:c0de:5eed::2")
	ownMAC  = []byte{2, 0, 0x0a, 0, 0, 2}
	gateMAC = []byte{2, 0, 0x0a, 0, 0, 1}

	bad   = netip.MustParseAddr(gatetest.Bad)
	bad6  = netip.MustParseAddr(gatetest.Bad6)
	good  = netip.MustParseAddr(gatetest.Good)
	good6 = netip.MustParseAddr(gatetest.Good6)
)

// packets tries packets that no socket of the kernel's makes. Whether they
// arrive only the world can tell.
func packets(add func(string, func() (string, error))) {
	for _, t := range []struct {
		what  string
		frame []byte
	}{
		{"ICMP echo", ip4(own, bad, unix.IPPROTO_ICMP, echo(8))},
		{"ICMP echo to an allowed name's address", ip4(own, good, unix.IPPROTO_ICMP, echo(8))},
		{"ICMPv6 echo", ip6(own6, bad6, unix.IPPROTO_ICMPV6, echo(128))},
		{"an ICMP error with data", ip4(own, bad, unix.IPPROTO_ICMP, echo(3))},
		{"an ICMP redirect", ip4(own, netip.MustParseAddr("192.0.0.1"), unix.IPPROTO_ICMP, echo(5))},
		{"a router advertisement", ip6(netip.MustParseAddr("fe80::1"), netip.MustParseAddr("ff02::1"), unix.IPPROTO_ICMPV6, echo(134))},
		{"GRE", ip4(own, bad, unix.IPPROTO_GRE, make([]byte, 16))},
		{"SCTP", ip4(own, bad, unix.IPPROTO_SCTP, make([]byte, 32))},
		{"ESP", ip4(own, bad, unix.IPPROTO_ESP, make([]byte, 32))},
		{"UDP-Lite", ip4(own, bad, unix.IPPROTO_UDPLITE, udp(5000, 9999))},
		{"an unknown protocol", ip4(own, bad, 253, make([]byte, 32))},
		{"IP in IP", ip4(own, good, unix.IPPROTO_IPIP, ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999)))},
		{"IPv6 in IP", ip4(own, good, unix.IPPROTO_IPV6, ip6(own6, bad6, unix.IPPROTO_UDP, udp(5000, 9999)))},
		{"IP in IPv6", ip6(own6, good6, unix.IPPROTO_IPIP, ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999)))},
		{"another's source", ip4(netip.MustParseAddr("198.51.100.77"), good, unix.IPPROTO_UDP, udp(5000, 80))},
		{"the node's source", ip4(netip.MustParseAddr(gatetest.Node), good, unix.IPPROTO_TCP, tcp(5000, 443, 2))},
		{"the gateway's source", ip4(netip.MustParseAddr("192.0.0.1"), good, unix.IPPROTO_TCP, tcp(5000, 443, 2))},
		{"the loopback's source", ip4(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr(gatetest.Node), unix.IPPROTO_TCP, tcp(5000, 2222, 2))},
		{"no source", ip4(netip.MustParseAddr("0.0.0.0"), bad, unix.IPPROTO_UDP, udp(68, 67))},
		{"another's source in IPv6", ip6(netip.MustParseAddr("2001:db8:51::77"), good6, unix.IPPROTO_TCP, tcp(5000, 443, 2))},
		{"a link-local source", ip6(netip.MustParseAddr("fe80::2"), bad6, unix.IPPROTO_UDP, udp(5000, 9999))},
		{"to the loopback", ip4(own, netip.MustParseAddr("127.0.0.1"), unix.IPPROTO_TCP, tcp(5000, 2222, 2))},
		{"to the loopback over IPv6", ip6(own6, netip.MustParseAddr("::1"), unix.IPPROTO_TCP, tcp(5000, 2222, 2))},
		{"to itself by the gateway", ip4(own, own, unix.IPPROTO_TCP, tcp(5000, 49983, 2))},
		{"a source route", options(ip4(own, good, unix.IPPROTO_TCP, tcp(5000, 443, 2)), 131, bad)},
		{"a strict source route", options(ip4(own, good, unix.IPPROTO_UDP, udp(5000, 443)), 137, bad)},
		{"record route", options(ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999)), 7, bad)},
		{"hop-by-hop options", ip6(own6, bad6, 0, append([]byte{unix.IPPROTO_UDP, 0, 1, 4, 0, 0, 0, 0}, udp(5000, 9999)...))},
		{"a routing header", ip6(own6, good6, 43, append(routing(bad6), udp(5000, 80)...))},
		{"destination options", ip6(own6, good6, 60, append([]byte{unix.IPPROTO_TCP, 0, 1, 4, 0, 0, 0, 0}, tcp(5000, 443, 2)...))},
		{"a fragment alone", fragment(ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999)), 0, true)},
		{"a fragment in the middle", fragment(ip4(own, good, unix.IPPROTO_TCP, tcp(5000, 443, 2)), 64, true)},
		{"a fragment at the end", fragment(ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999)), 128, false)},
		{"a fragment of IPv6", ip6(own6, bad6, 44, append([]byte{unix.IPPROTO_UDP, 0, 0, 1, 0, 0, 0, 9}, udp(5000, 9999)...))},
		{"TCP in the middle", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 443, 16))},
		{"TCP in the middle to an allowed name's address", ip4(own, good, unix.IPPROTO_TCP, tcp(5001, 22, 24))},
		{"TCP's answer to nothing", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 443, 18))},
		{"TCP with all flags", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 443, 63))},
		{"TCP with none", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 443, 0))},
		{"TCP begins and ends", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 443, 3))},
		{"TCP resets", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 443, 4))},
		{"TCP to port 0", ip4(own, bad, unix.IPPROTO_TCP, tcp(5000, 0, 2))},
		{"from DNS's port", ip4(own, bad, unix.IPPROTO_UDP, udp(53, 9999))},
		{"a broadcast to all", ip4(own, netip.MustParseAddr("255.255.255.255"), unix.IPPROTO_UDP, udp(68, 67))},
		{"a broadcast to a network", ip4(own, netip.MustParseAddr("198.51.100.255"), unix.IPPROTO_UDP, udp(5000, 9999))},
		{"a broken length", ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999))[:24]},
		{"version 5", append([]byte{0x55}, ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999))[1:]...)},
	} {
		add("raw: "+t.what, func() (string, error) { return "sent", sendFrame(ether(gateMAC, ownMAC, t.frame)) })
	}
	ordinary := ip4(own, bad, unix.IPPROTO_UDP, udp(5000, 9999))
	toGood := ip4(own, good, unix.IPPROTO_TCP, tcp(5002, 443, 2))
	for _, t := range []struct {
		what  string
		frame []byte
	}{
		{"another's hardware address", ether(gateMAC, []byte{2, 0, 0, 0, 0, 9}, toGood)},
		{"the gateway's hardware address", ether(gateMAC, gateMAC, toGood)},
		{"to all hardware", ether([]byte{255, 255, 255, 255, 255, 255}, ownMAC, ordinary)},
		{"to other hardware", ether([]byte{2, 0, 0, 0, 0, 7}, ownMAC, ordinary)},
		{"a VLAN", slices.Concat(gateMAC, ownMAC, []byte{0x81, 0, 0, 1, 8, 0}, ordinary)},
		{"two VLANs", slices.Concat(gateMAC, ownMAC, []byte{0x88, 0xa8, 0, 1, 0x81, 0, 0, 1, 8, 0}, ordinary)},
		{"IPv6 called IPv4", slices.Concat(gateMAC, ownMAC, []byte{8, 0}, ip6(own6, bad6, unix.IPPROTO_UDP, udp(5000, 9999)))},
		{"ARP for the gateway's address", slices.Concat([]byte{255, 255, 255, 255, 255, 255}, ownMAC, []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 2}, ownMAC, []byte{192, 0, 0, 1}, gateMAC, []byte{192, 0, 0, 1})},
		{"an unknown type of frame", slices.Concat(gateMAC, ownMAC, []byte{0x88, 0xb5}, []byte("evil"))},
		{"MPLS", slices.Concat(gateMAC, ownMAC, []byte{0x88, 0x47, 0, 1, 1, 64}, ordinary)},
		{"LLC", slices.Concat(gateMAC, ownMAC, []byte{0, 10}, []byte("evil evil!"))},
	} {
		add("frame: "+t.what, func() (string, error) { return "sent", sendFrame(t.frame) })
	}
	add("raw socket with a header of its own", func() (string, error) {
		return "sent", sendRaw(ip4(netip.MustParseAddr("198.51.100.77"), bad, unix.IPPROTO_UDP, udp(5000, 9999)))
	})
	add("ping socket", func() (string, error) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return "", err
		}
		defer unix.Close(fd)
		return "sent", unix.Sendto(fd, echo(8), 0, &unix.SockaddrInet4{Addr: bad.As4()})
	})
	add("datagram in fragments", func() (string, error) {
		return talk("udp", gatetest.Bad+":9999", string(make([]byte, 9000)))
	})
	add("fast open", func() (string, error) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return "", err
		}
		defer unix.Close(fd)
		return "sent", unix.Sendto(fd, []byte("evil"), unix.MSG_FASTOPEN, &unix.SockaddrInet4{Addr: bad.As4(), Port: 443})
	})
	add("more hops than none", func() (string, error) {
		d := net.Dialer{Timeout: moment}
		c, err := d.Dial("tcp", gatetest.Bad+":80")
		if err != nil {
			return "", err
		}
		return gatetest.Banner, c.Close()
	})
}

// sendFrame sends a frame on the sandbox's link.
func sendFrame(frame []byte) error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Flags&net.FlagLoopback == 0 && l.Flags&net.FlagUp != 0 {
			return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: l.Index})
		}
	}
	return errors.New("there is no link")
}

func sendRaw(packet []byte) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: bad.As4()})
}

func ether(dst, src, packet []byte) []byte {
	kind := []byte{8, 0}
	if packet[0]>>4 == 6 {
		kind = []byte{0x86, 0xdd}
	}
	return slices.Concat(dst, src, kind, packet)
}

func ip4(src, dst netip.Addr, proto byte, body []byte) []byte {
	p := []byte{0x45, 0, 0, 0, 0, 9, 0, 0, 64, proto, 0, 0}
	p = slices.Concat(p, src.AsSlice(), dst.AsSlice())
	binary.BigEndian.PutUint16(p[2:], uint16(20+len(body)))
	binary.BigEndian.PutUint16(p[10:], sum(p))
	return append(p, transport(src, dst, proto, body)...)
}

func ip6(src, dst netip.Addr, proto byte, body []byte) []byte {
	p := []byte{0x60, 0, 0, 0, 0, 0, proto, 64}
	binary.BigEndian.PutUint16(p[4:], uint16(len(body)))
	return slices.Concat(p, src.AsSlice(), dst.AsSlice(), transport(src, dst, proto, body))
}

// transport fills in the checksum of TCP and UDP.
func transport(src, dst netip.Addr, proto byte, body []byte) []byte {
	at := map[byte]int{unix.IPPROTO_TCP: 16, unix.IPPROTO_UDP: 6}[proto]
	if at == 0 {
		return body
	}
	body = slices.Clone(body)
	pseudo := slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, proto, byte(len(body) >> 8), byte(len(body))}, body)
	binary.BigEndian.PutUint16(body[at:], sum(pseudo))
	return body
}

func sum(b []byte) uint16 {
	var s uint32
	for i := 0; i < len(b); i += 2 {
		s += uint32(b[i]) << 8
		if i+1 < len(b) {
			s += uint32(b[i+1])
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

func udp(from, to uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = append(b, 0, 12, 0, 0)
	return append(b, "evil"...)
}

func tcp(from, to uint16, flags byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	return append(b, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0)
}

func echo(kind byte) []byte {
	b := append([]byte{kind, 0, 0, 0, 0, 7, 0, 1}, "evil evil evil evil"...)
	binary.BigEndian.PutUint16(b[2:], sum(b))
	return b
}

// options puts an option of IP that holds an address into a packet.
func options(p []byte, kind byte, addr netip.Addr) []byte {
	opt := slices.Concat([]byte{kind, 7, 4}, addr.AsSlice(), []byte{0})
	out := slices.Concat(p[:20], opt, p[20:])
	out[0] = 0x47
	binary.BigEndian.PutUint16(out[2:], uint16(len(out)))
	out[10], out[11] = 0, 0
	binary.BigEndian.PutUint16(out[10:], sum(out[:28]))
	return out
}

func routing(to netip.Addr) []byte {
	return slices.Concat([]byte{unix.IPPROTO_UDP, 2, 0, 1, 0, 0, 0, 0}, to.AsSlice())
}

// fragment makes a packet one at an offset in bytes.
func fragment(p []byte, offset uint16, more bool) []byte {
	v := offset / 8
	if more {
		v |= 1 << 13
	}
	p = slices.Clone(p)
	binary.BigEndian.PutUint16(p[6:], v)
	p[10], p[11] = 0, 0
	binary.BigEndian.PutUint16(p[10:], sum(p[:20]))
	return p
}
